"""Attention of blocks against a dense softmax under a mask, forward and backward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.block_attention.api import attend_blocks

NAMES = ("q", "k", "v", "k_context", "v_context")
# rows, blocks, block, tokens, heads, kv_heads, head_size
SIZES = {
    "several tiles": (2, 21, 7, 300, 4, 2, 8),
    "one tile": (2, 3, 16, 40, 2, 2, 8),
    "long": (1, 2, 130, 20, 1, 1, 8),
}
RULES = {
    "full": {},
    "causal": {"causal": True},
    "window": {"causal": True, "window": 9},
    "narrow": {"window": 3},
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


def dense(q, k, v, k_context, v_context, starts, anchors, *, scale, causal=False, window=None):
    block, tokens = q.shape[2], k_context.shape[1]
    group = q.shape[3] // k.shape[3]
    k, v, k_context, v_context = (jnp.repeat(x, group, axis=-2) for x in (k, v, k_context, v_context))
    row, token = np.arange(block), np.arange(tokens)[None, None, None]
    place = anchors[:, :, None, None] + row[None, None, :, None]
    seen = (token >= starts[:, :, None, None]) & (token < anchors[:, :, None, None])
    seen = jnp.broadcast_to(seen, (*anchors.shape, block, tokens))
    own = row[None] <= row[:, None] if causal else np.ones((block, block), bool)
    if window is not None:
        seen = seen & (token > place - window)
    scores = jnp.einsum("rnihd,rthd->rnhit", q, k_context, precision="highest")
    inside = jnp.einsum("rnihd,rnjhd->rnhij", q, k, precision="highest")
    scores = jnp.concatenate(
        [jnp.where(seen[:, :, None], scores, -jnp.inf), jnp.where(own[None, None, None], inside, -jnp.inf)],
        axis=-1,
    )
    weights = jax.nn.softmax(scores * scale, axis=-1)
    out = jnp.einsum("rnhit,rthd->rnihd", weights[..., :tokens], v_context, precision="highest")
    return out + jnp.einsum("rnhij,rnjhd->rnihd", weights[..., tokens:], v, precision="highest")


def with_gradients(attend, arrays, starts, anchors):
    target = jnp.asarray(np.random.default_rng(1).normal(size=arrays["q"].shape), jnp.float32)

    @jax.jit
    def run(arrays):
        def loss(arrays):
            out = attend(**arrays, starts=starts, anchors=anchors)
            return jnp.sum(out * target), out

        (_, out), grads = jax.value_and_grad(loss, has_aux=True)(arrays)
        return out, grads

    return run(arrays)


@pytest.mark.parametrize(
    ("sizes", "rules"),
    [("several tiles", name) for name in RULES]
    + [("one tile", "full"), ("one tile", "window"), ("long", "narrow")],
)
def test_outputs_and_gradients_are_those_of_a_masked_softmax(sizes, rules):
    arrays, starts, anchors = problem(SIZES[sizes])
    options = RULES[rules] | {"scale": 0.3}
    expected, expected_grads = with_gradients(functools.partial(dense, **options), arrays, starts, anchors)
    got, grads = with_gradients(functools.partial(attend_blocks, **options), arrays, starts, anchors)
    np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
    for name in NAMES:
        np.testing.assert_allclose(grads[name], expected_grads[name], rtol=1e-3, atol=1e-4, err_msg=name)


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
