"""What nothing else calls: scripts that look into an engine, on a small target."""

import importlib.util
import pathlib

import jax.numpy as jnp
import pytest

from jspec.decode import Method, Models
from jspec.drafters.tree_shape import chain_shape, dynamic_tree
from jspec.engine import Engine
from jspec.targets.table import TableTarget

FOLDER = pathlib.Path(__file__).parents[1] / "benchmarks"


@pytest.mark.parametrize("shape", [chain_shape(5), dynamic_tree(width=2, depth=3, draft_length=5)])
def test_the_parts_of_a_tree_round_are_timed(shape):
    spec = importlib.util.spec_from_file_location("tree_script", FOLDER / "tree.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    engine = Engine(
        method=Method(target=TableTarget(vocab_size=1024, max_context=512), drafter=script.Free(shape=shape)),
        models=Models(target=(jnp.eye(1024),), drafter=()),
        max_slots=1,
        max_context=512,
    )
    spent = script.seconds_of(engine, repeats=1)
    assert sorted(spent) == ["execute", "propose", "settle"] and min(spent.values()) > 0
