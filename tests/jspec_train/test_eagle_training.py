"""Whole runs of EAGLE, EAGLE-3 and P-EAGLE on a tiny target."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import MASK, Figures, leaves_of, write_data

import jspec
from jspec.checkpoints.draft_vocabulary import VOCABULARY_FILE, read_draft_vocabulary
from jspec.checkpoints.drafter import load_drafter
from jspec.checkpoints.eagle import load_eagle
from jspec.checkpoints.target import load_target
from jspec.drafters.eagle_net import eagle_net
from jspec.loading import with_drafter
from jspec.objectives.batch import on_devices
from jspec.objectives.eagle_pass import first_pass
from jspec.targets.decoder import decoder_leaves
from jspec.text.tokenizer import load_tokenizer
from jspec_train.commands.evaluate import evaluate_command
from jspec_train.commands.export import export_command
from jspec_train.evaluate import Pair, teacher_forced
from jspec_train.plan import plan_table
from jspec_train.recipe import recipe_of
from jspec_train.run import open_run
from jspec_train.samples import open_samples
from jspec_train.training import train_run

METHODS = {
    "eagle": {"drafter": {}, "objective": {"chunk": 16, "noise": "none"}},
    "eagle3": {
        "drafter": {"target_layer_ids": [0, 1, 2], "vocabulary": 24},
        "objective": {"depths": 3, "chunk": 8},
    },
    "peagle": {
        "drafter": {"target_layer_ids": [0, 2], "num_layers": 2, "vocabulary": 24, "mask_token_id": MASK},
        "objective": {"depths": 3, "chunk": 16},
        # The rows that a batch trains are drawn: its loss says less.
        "training": {"max_steps": 12, "batch_size": 4, "dtype": "float32"},
    },
}


@pytest.fixture
def recipe(target, data, tmp_path):
    def make(method, output="run", **changes):
        values = {
            "method": method,
            "target": str(target),
            "output": str(tmp_path / output),
            "data": {"train": str(data / "train"), "bucket": 24},
            "training": {"max_steps": 4, "batch_size": 4, "dtype": "float32"},
            "evaluation": {"every": 4, "loss_batches": 1, "prompts": 0, "max_tokens": 6},
            "checkpoints": {"every": 4, "keep": 2},
            "optimizer": {"learning_rate": 1e-2},
            "log_every": 1,
        } | METHODS[method]
        for name, value in changes.items():
            values[name] = values[name] | value if isinstance(values.get(name), dict) else value
        return recipe_of(values, "test")

    return make


@pytest.mark.parametrize("method", METHODS)
def test_a_run_ends_with_a_drafter_that_decodes(recipe, target, data, tmp_path, method):
    figures = Figures()
    validation = {"validation": str(data / "validation")}
    run = open_run(recipe(method, data=validation, evaluation={"prompts": 2, "draft_length": 2}))
    assert plan_table(run).row_count
    train_run(run, watchers=lambda done: [figures])
    last = max(figures.losses)
    assert figures.losses[last] < figures.losses[1]
    found = figures.evaluations[last]
    assert {"loss", "accuracy", "acceptance", "drafted", "mean_commit_length"} <= set(found)
    if method != "eagle":
        assert {"cross_entropy@3", "accuracy@3", "acceptance@3"} <= set(found)
    best = tmp_path / "run" / "best"
    engine = jspec.load(str(target), drafter=str(best), draft_length=2)
    plain = jspec.load(str(target), drafter="plain")
    settings = jspec.Settings(max_tokens=8, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 10, 11, 12]]
    assert [r.token_ids for r in engine.generate(prompts, settings)] == [
        r.token_ids for r in plain.generate(prompts, settings)
    ]


@pytest.mark.parametrize(
    ("method", "drafter", "layouts"),
    [
        ("eagle", {}, ["eagle"]),
        (
            "eagle3",
            {"num_layers": 2, "window": 4, "layer_kinds": ["full", "window"]},
            ["sglang", "specforge", "speculators"],
        ),
        ("eagle3", {"query_key_norm": True, "vocabulary": None}, ["deepspec", "speculators"]),
    ],
    ids=["eagle", "eagle3", "deepspec"],
)
def test_an_exported_drafter_has_the_trained_logits(recipe, tmp_path, target, data, method, drafter, layouts):
    run = open_run(recipe(method, drafter=drafter))
    outcome = train_run(run)
    batch = on_devices(next(run.batches(run.source, epochs=1)))
    features = jax.jit(run.trainer.capture)(run.target, batch).features[
        :, :, : run.method.config.features_size
    ]

    @jax.jit
    def logits(params):
        net = eagle_net(run.method.config, params)
        states = first_pass(net, run.target.embed, batch, features).states
        return net.logits(states.reshape(-1, states.shape[2]), run.target.logits)

    trained = logits(run.trainer.params(outcome.state, run.frozen))
    for layout in layouts:
        export_command(tmp_path / "run", tmp_path / layout, layout=layout, dtype="float32")
        loaded = load_eagle(tmp_path / layout, jnp.float32)
        assert loaded.drafter.config == run.method.config
        np.testing.assert_array_equal(trained, logits(loaded.params))
    pair = Pair(
        target=load_target(target, dtype="float32"),
        tokenizer=load_tokenizer(target),
        drafter=loaded,
        dtype=jnp.dtype("float32"),
    )
    assert np.isfinite(teacher_forced(pair, open_samples(data / "validation"))["loss"])


def test_an_interrupted_eagle3_run_goes_on_bit_equal(recipe, data):
    watched = {"validation": str(data / "validation")}
    whole = train_run(open_run(recipe("eagle3", "whole")))
    first = train_run(
        open_run(recipe("eagle3", "parts", data=watched)), watchers=lambda done: [Figures(stop_at=2)]
    )
    assert first.interrupted and int(first.state.step) == 2
    second = train_run(open_run(recipe("eagle3", "parts", data=watched)), resume=True)
    for a, b in zip(leaves_of(whole), leaves_of(second), strict=True):
        np.testing.assert_array_equal(a, b)


def test_noise_is_drawn_anew_for_every_update_and_again_after_a_resume(recipe):
    objective = {"noise": "gaussian", "noise_width": 0.5}
    whole = train_run(open_run(recipe("eagle", "whole", objective=objective)))
    train_run(
        open_run(recipe("eagle", "parts", objective=objective)), watchers=lambda done: [Figures(stop_at=3)]
    )
    again = train_run(open_run(recipe("eagle", "parts", objective=objective)), resume=True)
    for a, b in zip(leaves_of(whole), leaves_of(again), strict=True):
        np.testing.assert_array_equal(a, b)


def test_what_is_frozen_or_shared_is_not_stored(recipe, tmp_path):
    run = open_run(recipe("eagle3"))
    assert "embedding" not in {leaf.path for leaf in run.trainer.leaves}
    assert [leaf.path for leaf in run.trainer.leaves if leaf.path in run.trainer.frozen] == ["draft_ids"]


def test_a_start_from_the_target_has_its_layer_norm_and_head(recipe):
    run = open_run(recipe("eagle3", training={"start": "target"}))
    held = {leaf.path: p for leaf, p in zip(run.trainer.leaves, run.start_params, strict=True)}
    target, loaded = run.loaded.target, run.loaded
    theirs = decoder_leaves(target.config, jnp.dtype(jnp.float32))
    taken = {leaf.path: p for leaf, p in zip(theirs, loaded.params, strict=True)}
    last, hidden = f"layers.{target.num_layers - 1}.", target.hidden_size
    np.testing.assert_array_equal(held["norm"], taken["norm"])
    np.testing.assert_array_equal(held["layers.0.mlp.up"], taken[f"{last}mlp.up"])
    np.testing.assert_array_equal(held["layers.0.state_norm"], taken[f"{last}attention_norm"])
    np.testing.assert_array_equal(held["layers.0.attention.query"][hidden:], taken[f"{last}attention.query"])
    np.testing.assert_array_equal(held["fc"][-hidden:], np.eye(hidden))
    states = jax.random.normal(jax.random.key(0), (3, hidden))
    wanted = target.logits(loaded.params, states)[:, held["draft_ids"]]
    np.testing.assert_allclose(states @ held["head"], wanted, rtol=1e-5, atol=1e-5)


def test_the_vocabulary_is_kept_and_other_data_are_refused(recipe, target, data, tmp_path):
    run = open_run(recipe("eagle3"))
    train_run(run)
    kept, best = read_draft_vocabulary(tmp_path / "run"), read_draft_vocabulary(tmp_path / "run" / "best")
    assert kept == best == run.vocabulary
    contract = json.loads((tmp_path / "run" / "recipe.json").read_text())
    assert contract["training_data"]["draft_vocabulary"] == kept.key
    write_data(tmp_path / "other", target, 24, 7)
    with pytest.raises(ValueError, match=r"drafter.vocabulary: expected the data .* was counted on, got"):
        open_run(recipe("eagle3", data={"train": str(tmp_path / "other")}))
    with pytest.raises(ValueError, match=r"drafter.vocabulary: expected the size 24 .* got 25"):
        open_run(recipe("eagle3", drafter={"vocabulary": 25}))


def test_ids_of_another_vocabulary_beside_the_weights_are_refused(recipe, target, data, tmp_path):
    train_run(open_run(recipe("eagle3", "first")))
    path = tmp_path / "first" / "best" / VOCABULARY_FILE
    values = json.loads(path.read_text())
    missing = next(i for i in range(61) if i not in values["ids"])
    path.write_text(json.dumps(values | {"ids": sorted([missing, *values["ids"][1:]])}))
    with pytest.raises(
        ValueError, match=r"expected draft id \d+ at column \d+, as draft_vocabulary.json says"
    ):
        load_eagle(path.parent, jnp.float32)
    other = dataclasses.replace(read_draft_vocabulary(tmp_path / "first"), tokenizer="another")
    path.write_text(other.json())
    plain = jspec.load(str(target), drafter="plain", max_slots=1)
    for loading in (
        lambda: jspec.load(str(target), drafter=str(path.parent)),
        lambda: with_drafter(plain, path.parent),
        lambda: evaluate_command(path.parent, data / "validation", str(target), compilation_cache=""),
    ):
        with pytest.raises(
            ValueError, match=r"draft_vocabulary.json: expected the tokenizer another, .* got"
        ):
            loading()
    assert load_drafter(path.parent, jnp.float32).params  # nobody says with which target
    path.write_text(json.dumps(values | {"data": "another"}))
    with pytest.raises(ValueError, match=r"draft_vocabulary.json: expected the key .* of its own contents"):
        load_eagle(path.parent, jnp.float32)


def test_warm_start_takes_weights_and_vocabulary(recipe, tmp_path):
    train_run(open_run(recipe("eagle3", "first")))
    best = tmp_path / "first" / "best"
    again = open_run(recipe("eagle3", "again", training={"warm_start": str(best)}))
    assert again.vocabulary == read_draft_vocabulary(best)
    for a, b in zip(again.start_params, load_eagle(best, jnp.float32).params, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(
        ValueError, match=r"training.warm_start: expected a drafter \(EAGLE-3.*, got \(EAGLE-3"
    ):
        open_run(
            recipe("eagle3", "other", drafter={"intermediate_size": 8}, training={"warm_start": str(best)})
        )


@pytest.mark.parametrize(
    ("method", "changes", "message"),
    [
        (
            "eagle",
            {"drafter": {"block_size": 4}},
            "drafter.block_size: expected one of fc_bias, .* unknown key",
        ),
        ("eagle", {"objective": {"depths": 4}}, "objective.depths: expected one of chunk, .* unknown key"),
        ("eagle3", {"objective": {"noise": "none"}}, "objective.noise: expected one of .* unknown key"),
        (
            "eagle3",
            {"objective": {"depths": 24}},
            r"objective.depths: expected at most 23, .* the longest sample \(24\), got 24",
        ),
        (
            "peagle",
            {"objective": {"depths": 22}},
            "objective.depths: expected at most 20, the longest stretch",
        ),
        ("eagle3", {"drafter": {"target_layer_ids": None}}, "target_layer_ids: expected three layers"),
        ("eagle3", {"drafter": {"target_layer_ids": [0, 1, 3]}}, "layer 3 does not exist"),
        ("eagle3", {"drafter": {"vocabulary": 62}}, "vocabulary"),
        (
            "eagle3",
            {"drafter": {"head_reads_norm": False, "feeds_back_norm": True}},
            "config.head_reads_norm: expected a value that layout sglang can say|config.feeds_back_norm: expected",
        ),
        (
            "eagle3",
            {"drafter": {"layer_kinds": ["window"]}},
            "drafter.window: expected a size for the window layers, got None",
        ),
        ("eagle3", {"drafter": {"hidden_size": 8, "own_head": False}}, "drafter.own_head: expected true"),
        ("eagle3", {"drafter": {"feature_norms": True, "norm_before_fc": True}}, "drafter.norm_before_fc"),
        (
            "peagle",
            {"drafter": {"mask_token_id": 7}},
            "mask_token_id: expected an id that no text has, got 7",
        ),
        ("peagle", {"training": {"start": "target"}}, "training.start: expected fresh with method peagle"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_the_start(recipe, method, changes, message):
    with pytest.raises(ValueError, match=message):
        open_run(recipe(method, **changes))


def test_eagle3_is_rolled_out_of_the_prompt_where_answers_are_short(recipe):
    run = open_run(recipe("eagle3", objective={"depths": 22, "chunk": 8}))  # 20 tokens are supervised at most
    assert run.trainer.objective.depths == 22


def test_an_unknown_method_is_named():
    with pytest.raises(ValueError, match=r"method: expected one of dflash, .*eagle3, peagle, got 'x'"):
        recipe_of({"method": "x"}, "test")
