"""What nothing else calls: scripts that look into an engine, on a small target."""

import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

from jspec.decode import Method, Models
from jspec.drafters.tree_shape import chain_shape, dynamic_tree
from jspec.engine import Engine
from jspec.targets.table import TableTarget

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


def script_of(name):
    spec = importlib.util.spec_from_file_location(f"{name}_script", FOLDER / f"{name}.py")
    script = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = script  # where dataclasses look for the module of their annotations
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize("shape", [chain_shape(5), dynamic_tree(width=2, depth=3, draft_length=5)])
def test_the_parts_of_a_tree_round_are_timed(shape):
    script = script_of("tree")
    engine = Engine(
        method=Method(target=TableTarget(vocab_size=1024, max_context=512), drafter=script.Free(shape=shape)),
        models=Models(target=(jnp.eye(1024),), drafter=()),
        max_slots=1,
        max_context=512,
    )
    spent = script.seconds_of(engine, repeats=1)
    assert sorted(spent) == ["execute", "propose", "settle"] and min(spent.values()) > 0


def test_what_scheduling_costs_is_told_beside_the_rounds_of_a_table(tmp_path):
    script, said = script_of("scheduling"), []
    table = {
        "sample_batch_tokens": [1, 4, 16],
        "sample_steps_per_sec": [1e-6, 9e-7, 8e-7],
        "max_batch_tokens": 16,
    }
    (tmp_path / "costs.json").write_text(json.dumps(table))
    sizes = ["--draft-length", "3", "--max-slots", "4", "--concurrency", "1", "3", "--rounds", "8"]
    script.main(["--schedule", str(tmp_path / "costs.json"), *sizes], said.append)
    assert [line.partition(":")[0] for line in said] == ["1 requests", "3 requests"]
    assert all(", 0.00% of a round" in line and line.endswith(": less than 2%") for line in said)
    table["sample_steps_per_sec"] = [1e9, 9e8, 8e8]
    (tmp_path / "costs.json").write_text(json.dumps(table))
    script.main(["--schedule", str(tmp_path / "costs.json"), *sizes], said.append)
    assert said[-1].endswith("NOT less than 2%")


@pytest.mark.extended
@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="jax 0.12 and newer interpret Mosaic GPU kernels")
def test_the_script_for_a_gpu_runs_without_one(capsys, monkeypatch):
    script = script_of("gpu")
    with pytest.raises(SystemExit, match="device: expected a GPU"):
        script.main([])
    assert script.main(["--tiny"]) == 0
    said = capsys.readouterr().out
    expected = (
        "tree, xla: error", "tree, gpu: error", "odd, unfiltered, gpu: error", "odd, filtered, gpu: error",
        "simulated, 1 slots",
    )  # fmt: skip
    assert all(part in said for part in expected)
    for name in ("TOLERANCE", "ROW_TOLERANCE"):
        with monkeypatch.context() as changed:
            changed.setattr(script, name, -1.0)
            assert script.main(["--tiny"]) == 1
