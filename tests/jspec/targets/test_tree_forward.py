"""One target pass over a chunk and a tree behind it equals a chain for each way down."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from target_chain import empty_cache, run_chain

from jspec.checkpoints.target import load_target
from jspec.round import Nodes

FOLDER = Path(__file__).parents[2] / "data" / "targets"
# Within the lane: 4 certain tokens, then a tree; padding behind it.
PARENTS = [-1, 0, 1, 2, 3, 3, 5, 5, 7, 8, 4, 6]


@pytest.mark.parametrize(("name", "context"), [("gemma3_new", 13), ("qwen2_window", 0)])
def test_chunk_and_tree_in_one_pass(name, context):
    loaded = load_target(FOLDER / name, dtype="float32")
    rng = np.random.default_rng(context)
    before = rng.integers(0, loaded.target.vocab_size, context).tolist()
    tokens = rng.integers(0, loaded.target.vocab_size, len(PARENTS)).tolist()
    cache = (
        run_chain(loaded.target, loaded.params, before, capacity=32).cache
        if context
        else empty_cache(loaded.target, 32)
    )
    depths = [0]
    for parent in PARENTS[1:]:
        depths.append(depths[parent] + 1)
    padding = 3
    nodes = Nodes(
        tokens=jnp.asarray([*tokens, *[0] * padding], jnp.int32),
        positions=jnp.asarray([*(context + d for d in depths), *[0] * padding], jnp.int32),
        offsets=jnp.asarray([0, len(tokens), len(tokens)], jnp.int32),
        certain_lengths=jnp.asarray([4, 0], jnp.int32),
        parents=jnp.asarray([*PARENTS, *[-1] * padding], jnp.int32),
    )

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def logits(params, nodes, cache):
        lanes = jnp.asarray([0, -1], jnp.int32)
        out = loaded.target.forward(params, nodes, cache, lanes, (), max_queries=len(tokens) + padding)
        return loaded.target.logits(params, out.hidden)

    got = np.asarray(logits(loaded.params, nodes, cache))
    for node in (3, 9, 10, 11):
        path, above = [], node
        while above >= 0:
            path.insert(0, above)
            above = PARENTS[above]
        line = run_chain(loaded.target, loaded.params, [*before, *(tokens[i] for i in path)]).logits[context:]
        np.testing.assert_allclose(got[path], line, atol=3e-5, rtol=3e-5)
