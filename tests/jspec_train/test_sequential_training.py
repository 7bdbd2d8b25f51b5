"""Whole runs of DSpark and Domino on a tiny target."""

import jax.numpy as jnp
import numpy as np
import pytest
from training_runs import MASK, Figures

import jspec
from jspec.checkpoints.dflash import load_dflash
from jspec.checkpoints.target import load_target
from jspec.text.tokenizer import load_tokenizer
from jspec_train.check.subject import open_subject
from jspec_train.commands.export import export_command
from jspec_train.evaluate import Pair, teacher_forced
from jspec_train.plan import plan_table
from jspec_train.recipe import recipe_of
from jspec_train.run import open_run
from jspec_train.samples import open_samples
from jspec_train.training import train_run

METHODS = {
    "dspark": {
        "drafter": {"vocabulary": 24, "markov": {"rank": 4, "kind": "rnn"}},
        "objective": {"num_anchors": 6, "gamma": 3.0},
    },
    "domino": {"drafter": {"gru": {"size": 6, "rank": 4}}, "objective": {"num_anchors": 6}},
}


@pytest.fixture
def recipe(target, data, tmp_path):
    def make(method, **changes):
        sizes = {"num_layers": 1, "block_size": 3, "mask_token_id": MASK, "target_layer_ids": [0, 2]}
        values = {
            "method": method,
            "target": str(target),
            "output": str(tmp_path / "run"),
            "data": {"train": str(data / "train"), "bucket": 24},
            "drafter": sizes | METHODS[method]["drafter"],
            "objective": {"chunk_blocks": 16} | METHODS[method]["objective"],
            "training": {"max_steps": 4, "batch_size": 4, "dtype": "float32"},
            "evaluation": {"every": 4, "loss_batches": 1, "prompts": 0, "max_tokens": 6},
            "checkpoints": {"every": 4, "keep": 2},
            "optimizer": {"learning_rate": 1e-2},
            "log_every": 1,
        }
        for name, value in changes.items():
            values[name] = values[name] | value
        return recipe_of(values, "test")

    return make


@pytest.mark.parametrize("method", METHODS)
def test_a_run_ends_with_a_drafter_that_decodes(recipe, target, data, tmp_path, method):
    figures = Figures()
    validation = {"validation": str(data / "validation")}
    run = open_run(recipe(method, data=validation, evaluation={"prompts": 2}))
    assert plan_table(run).row_count
    outcome = train_run(run, watchers=lambda done: [figures])
    assert figures.losses[4] < figures.losses[1]
    found = figures.evaluations[4]
    assert {"loss", "accuracy@3", "accept_length", "mean_commit_length"} <= set(found)
    if method == "dspark":
        assert {"acceptance@3", "confidence_error@3", "tau_probabilistic", "calibration_error"} <= set(found)
        assert not any(name.startswith("binned") for name in found)
    engine = jspec.load(str(target), drafter=str(tmp_path / "run" / "best"))
    plain = jspec.load(str(target), drafter="plain")
    settings = jspec.Settings(max_tokens=8, ignore_eos=True)
    prompts = [[5, 6, 7], [9, 10, 11, 12]]
    assert [r.token_ids for r in engine.generate(prompts, settings)] == [
        r.token_ids for r in plain.generate(prompts, settings)
    ]

    export_command(tmp_path / "run", tmp_path / "out", dtype="float32")
    loaded = load_dflash(tmp_path / "out", jnp.float32)
    assert loaded.drafter.config == run.method.config
    for ours, theirs in zip(run.trainer.params(outcome.state, run.frozen), loaded.params, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    pair = Pair(
        target=load_target(target, dtype="float32"),
        tokenizer=load_tokenizer(target),
        drafter=loaded,
        dtype=jnp.dtype("float32"),
    )
    assert np.isfinite(teacher_forced(pair, open_samples(data / "validation"))["loss"])
    with pytest.raises(ValueError, match=r"drafter: expected an EAGLE or DFlash drafter, got the D"):
        open_subject(str(target), str(tmp_path / "out"), None, "float32")


def test_a_block_that_no_answer_holds_is_refused(recipe):
    with pytest.raises(ValueError, match=r"drafter.block_size: expected at most 19, .* is 20, got 20"):
        open_run(recipe("dspark", drafter={"block_size": 20}))
