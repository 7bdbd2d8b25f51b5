"""Attention of blocks: its memory, and what it refuses."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention.api import attend_blocks

# rows, blocks, block, tokens, heads, kv_heads, head_size
SIZES = {
    "several tiles": (2, 21, 7, 300, 4, 2, 8),
    "one tile": (2, 3, 16, 40, 2, 2, 8),
    "long": (1, 2, 130, 20, 1, 1, 8),
}


def problem(sizes, dtype=np.float32) -> tuple[dict, jax.Array, jax.Array]:
    rows, blocks, block, tokens, heads, kv_heads, size = sizes
    rng = np.random.default_rng(0)
    shapes = {
        "q": (rows, blocks, block, heads, size),
        "k": (rows, blocks, block, kv_heads, size),
        "v": (rows, blocks, block, kv_heads, size),
        "k_context": (rows, tokens, kv_heads, size),
        "v_context": (rows, tokens, kv_heads, size),
    }
    arrays = {name: jnp.asarray(rng.normal(size=shape), dtype) for name, shape in shapes.items()}
    anchors = np.sort(rng.integers(0, tokens, size=(rows, blocks)), axis=1)
    starts = (anchors * rng.random(anchors.shape)).astype(int)
    anchors[:, -1] = starts[:, -1] = 0  # not kept
    starts[:, 0] = anchors[:, 0]  # at the start of its document
    return arrays, jnp.asarray(starts, jnp.int32), jnp.asarray(anchors, jnp.int32)


@pytest.mark.optimized
def test_memory_does_not_grow_with_blocks_times_tokens():
    arrays, starts, anchors = problem((1, 256, 8, 2048, 2, 1, 16))

    def loss(arrays):
        return jnp.sum(attend_blocks(**arrays, starts=starts, anchors=anchors, scale=0.3) ** 2)

    held = jax.jit(jax.grad(loss)).lower(arrays).compile().memory_analysis().temp_size_in_bytes
    scores = 256 * 8 * 2048 * 2 * 4
    operands = sum(x.nbytes for x in arrays.values())
    assert held < 8 * operands < scores / 2


def test_what_cannot_be_had_is_refused():
    arrays, starts, anchors = problem(SIZES["one tile"])
    with pytest.raises(ValueError, match="window: expected at least 1"):
        attend_blocks(**arrays, starts=starts, anchors=anchors, scale=1.0, window=0)
    with pytest.raises(ValueError, match="implementation: expected None"):
        attend_blocks(**arrays, starts=starts, anchors=anchors, scale=1.0, implementation="gpu")
