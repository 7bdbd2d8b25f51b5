"""Whole runs on a tiny target: recipe, updates, checkpoints, resume, evaluation, the drafter at the end."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from training_runs import MASK, Figures, leaves_of

import jspec
from jspec.capture import Capture
from jspec.checkpoints.dflash import load_dflash
from jspec.checkpoints.target import load_target
from jspec.features import layer_outputs
from jspec_train.checkpoints import Checkpoints
from jspec_train.feature_store import capture_to_store
from jspec_train.recipe import recipe_of
from jspec_train.run import open_run
from jspec_train.training import train_run


@pytest.fixture
def recipe(target, data, tmp_path):
    def make(output="run", **changes):
        values = {
            "method": "dflash",
            "target": str(target),
            "output": str(tmp_path / output),
            "data": {"train": str(data / "train"), "bucket": 24},
            "drafter": {"num_layers": 1, "block_size": 4, "mask_token_id": MASK, "target_layer_ids": [0, 2]},
            "objective": {"num_anchors": 8, "gamma": 3.0, "chunk_blocks": 16},
            "training": {"epochs": 2, "batch_size": 4, "dtype": "float32"},
            "evaluation": {"every": 6, "loss_batches": 1, "prompts": 0, "max_tokens": 6},
            "checkpoints": {"every": 4, "keep": 2},
            "log_every": 2,
        }
        for name, value in changes.items():
            values[name] = values[name] | value if isinstance(values.get(name), dict) else value
        return recipe_of(values, "test")

    return make


def test_a_run_ends_with_a_drafter_that_decodes(recipe, target, data, tmp_path):
    figures = Figures()
    # Only here, and in the DFlash 2 run below, are evaluations a part: they compile an engine.
    validation = {"validation": str(data / "validation")}
    run = open_run(recipe(data=validation, evaluation={"prompts": 2}))
    outcome = train_run(run, watchers=lambda done: [figures])
    assert int(outcome.state.step) == run.total_steps == 12 and not outcome.interrupted
    assert sorted(figures.losses) == [2, 4, 6, 8, 10, 12]
    assert sorted(figures.evaluations) == [6, 12]
    assert {"mean_commit_length", "mean_commit_length[even]", "loss"} <= set(figures.evaluations[12])
    best = tmp_path / "run" / "best"
    assert json.loads((best / "training.json").read_text())["figures"]["mean_commit_length"] >= 1
    engine = jspec.load(str(target), drafter=str(best))
    plain = jspec.load(str(target), drafter="plain")
    settings = jspec.Settings(max_tokens=8, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 10, 11, 12]]
    assert [r.token_ids for r in engine.generate(prompts, settings)] == [
        r.token_ids for r in plain.generate(prompts, settings)
    ]


def test_an_interrupted_run_goes_on_bit_equal(recipe, data):
    watched = {"validation": str(data / "validation")}  # evaluations must not disturb the training
    whole = train_run(open_run(recipe("whole")))
    for stop_at in (2, 6):
        name = f"parts{stop_at}"
        first = train_run(
            open_run(recipe(name, data=watched)), watchers=lambda done, n=stop_at: [Figures(stop_at=n)]
        )
        assert first.interrupted and int(first.state.step) == stop_at
        starts = []
        second = train_run(
            open_run(recipe(name, data=watched)),
            resume=True,
            watchers=lambda done, s=starts: s.append(done) or [],
        )
        assert starts == [stop_at]
        for a, b in zip(leaves_of(whole), leaves_of(second), strict=True):
            np.testing.assert_array_equal(a, b)


def test_stored_features_train_like_captured_ones(recipe, target, data, tmp_path):
    loaded = load_target(target, dtype="float32")
    from jspec_train.samples import open_samples

    chosen = Capture(target=loaded.target, names=layer_outputs((0, 2)), dtype="float32")
    capture_to_store(chosen, loaded.params, open_samples(data / "train"), tmp_path / "features")
    captured, stored = Figures(), Figures()
    train_run(open_run(recipe("a")), watchers=lambda done: [captured])
    offline = recipe("b", data={"train": str(tmp_path / "features")})
    train_run(open_run(offline), watchers=lambda done: [stored])
    assert captured.losses == pytest.approx(stored.losses, rel=1e-5)


def test_stored_states_are_chosen_by_name(recipe, target, data, tmp_path):
    from jspec_train.samples import open_samples

    loaded = load_target(target, dtype="float32")
    chosen = Capture(
        target=loaded.target, names=("final_norm", "layer.2", "layer.1", "layer.0"), dtype="float32"
    )
    capture_to_store(chosen, loaded.params, open_samples(data / "train"), tmp_path / "features")
    run = open_run(recipe(data={"train": str(tmp_path / "features")}))
    assert run.source.header.features.names == ("layer.0", "layer.2")
    stored = open_samples(tmp_path / "features")[3].features
    width = loaded.target.hidden_size
    wanted = np.concatenate([stored[:, 3 * width :], stored[:, width : 2 * width]], axis=1)
    np.testing.assert_array_equal(run.source[3].features, wanted)


def test_states_that_are_not_stored_are_refused(recipe, target, data, tmp_path):
    from jspec_train.samples import open_samples

    loaded = load_target(target, dtype="float32")
    chosen = Capture(target=loaded.target, names=layer_outputs((0, 1)), dtype="float32")
    capture_to_store(chosen, loaded.params, open_samples(data / "train"), tmp_path / "features")
    with pytest.raises(
        ValueError, match=r"data.train: expected features \['layer.0', 'layer.2'\], .* without layer.2 in"
    ):
        open_run(recipe(data={"train": str(tmp_path / "features")}))


def test_resuming_with_another_recipe_or_over_a_run_is_refused(recipe):
    train_run(open_run(recipe(training={"max_steps": 2})))
    with pytest.raises(
        ValueError, match=r"objective.gamma: expected 3.0 as the run in .* has it, got 4.0; resume"
    ):
        train_run(open_run(recipe(training={"max_steps": 2}, objective={"gamma": 4.0})), resume=True)
    with pytest.raises(ValueError, match=r"output: expected a new folder, got .*--resume"):
        train_run(open_run(recipe(training={"max_steps": 2})))


def test_a_sample_that_breaks_the_loss_is_named_and_nothing_is_saved_of_it(recipe, monkeypatch):
    run = open_run(recipe())
    fill = run.trainer.capture

    def poisoned(target, batch):
        batch = fill(target, batch)
        return dataclasses.replace(batch, features=batch.features.at[0, 5].set(np.nan))

    run = dataclasses.replace(run, trainer=dataclasses.replace(run.trainer, capture=poisoned))
    with pytest.raises(
        FloatingPointError, match=r"update 1: expected finite numbers, got loss nan.*samples s\d+, s\d+"
    ):
        train_run(run)


def test_warm_start_takes_the_weights_and_dflash2_trains_on_from_them(recipe, data, tmp_path):
    run = open_run(recipe("first", training={"max_steps": 2}))
    train_run(run)
    best = str(tmp_path / "first" / "best")
    again = open_run(recipe("again", training={"max_steps": 2, "warm_start": best}))
    for a, b in zip(again.start_params, load_dflash(best, "float32").params, strict=True):
        np.testing.assert_array_equal(a, b)
    drafter = {"convolution": {"taps": 2, "group_size": 8}, "selector": {"rank": 4, "top_k": 3}}
    second = recipe(
        "second",
        method="dflash2",
        data={"validation": str(data / "validation")},
        drafter=drafter,
        training={"max_steps": 2, "warm_start": best},
    )
    figures = Figures()
    train_run(open_run(second), watchers=lambda done: [figures])
    assert {"coverage", "oracle_accept_length", "walk_accept_length"} <= set(figures.evaluations[2])


@pytest.mark.extended
def test_a_reduced_vocabulary_drafts_its_ids_only(recipe, target, tmp_path):
    run = open_run(recipe("reduced", drafter={"vocabulary": 16}))
    train_run(run)
    loaded = load_dflash(tmp_path / "reduced" / "best", "float32")
    assert loaded.drafter.config.draft_vocab_size == 16
    engine = jspec.load(str(target), drafter=str(tmp_path / "reduced" / "best"))
    plain = jspec.load(str(target), drafter="plain")
    for settings in (
        jspec.Settings(max_tokens=12, ignore_eos=True),
        jspec.Settings(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True),
    ):
        assert (
            engine.generate([[5, 6, 7]], settings)[0].token_ids
            == plain.generate([[5, 6, 7]], settings)[0].token_ids
        )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"drafter": {"mask_token_id": 7}},
            "mask_token_id: expected an id that no text has, got 7, which is in sample s",
        ),
        ({"drafter": {"mask_token_id": 61}}, "mask_token_id: expected 0 to 60, got 61"),
        ({"drafter": {"mask_token_id": None}}, "mask_token_id: expected an id, got None"),
        ({"drafter": {"target_layer_ids": [0, 3]}}, "target_layer_ids: expected -1 .* to 2, got 3"),
        ({"drafter": {"block_size": 32}}, "block_size: expected at most 2., .* longest stretch .* got 32"),
        ({"evaluation": {"prompts": 2}}, "data.validation: expected a folder"),
        ({"data": {"train": "/nowhere"}}, "samples: expected a folder, got /nowhere"),
        ({"training": {"batch_size": 100, "epochs": 1}}, "batch_size"),
        ({"training": {"warm_start": "/nowhere"}}, "training.warm_start: expected a drafter's folder"),
        ({"data": {"pack": True}}, "training.max_steps: expected a number with data.pack"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_start(recipe, changes, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        train_run(open_run(recipe(**changes)))


def test_packed_rows_train_too(recipe):
    run = open_run(
        recipe("packed", data={"pack": True, "max_length": 48}, training={"max_steps": 2, "batch_size": 2})
    )
    outcome = train_run(run)
    assert int(outcome.state.step) == 2


def test_the_best_checkpoint_is_the_one_that_decodes_best(recipe, tmp_path, monkeypatch):
    made = recipe("scores", checkpoints={"every": 1, "keep": 1})
    run = open_run(made)
    checkpoints = Checkpoints(tmp_path / "scores", made, run.data_identity, resume=False)
    state = run.trainer.start(run.start_params)
    for step, score in ((1, 1.5), (2, 2.5), (3, 2.0)):
        state = dataclasses.replace(state, step=jax.numpy.asarray(step))
        checkpoints.save(state, {}, {"mean_commit_length": score, "loss": float(step)})
    checkpoints.wait()
    assert checkpoints.best_step() == 2
    checkpoints.close()
