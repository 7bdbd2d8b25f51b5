"""The TPU kernels of attend_blocks in TPU interpret mode, against plain XLA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from race_checks import assert_no_race

from pallas_kernels.block_attention import reference, tpu
from pallas_kernels.block_attention.api import attend_blocks
from pallas_kernels.block_attention.layout import Laid, Rules, lay_out

RULES = [
    Rules(scale=0.3, block_size=7, window=None, causal=False),
    Rules(scale=0.3, block_size=7, window=50, causal=True),
]
ROWS, BLOCKS, TOKENS, HEADS, KV_HEADS, SIZE = 2, 21, 300, 2, 1, 8  # two tiles of blocks, two of context


def laid_out(rules: Rules, anchors: np.ndarray, starts: np.ndarray) -> Laid:
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    block = (ROWS, BLOCKS, rules.block_size)
    own = [normal(*block, heads, SIZE) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    context = [normal(ROWS, TOKENS, KV_HEADS, SIZE) for _ in range(2)]
    return lay_out(*own, *context, jnp.asarray(starts, jnp.int32), jnp.asarray(anchors, jnp.int32), rules)


@functools.cache
def programs(rules: Rules, races: bool):
    interpret = pltpu.InterpretParams(
        detect_races=races, dma_execution_mode="eager" if races else "on_wait", out_of_bounds_reads="raise"
    )
    ours = (functools.partial(f, rules=rules, interpret=interpret) for f in (tpu.forward, tpu.backward))
    plain = (jax.jit(functools.partial(f, rules=rules)) for f in (reference.forward, reference.backward))
    return tuple(ours), tuple(plain)


def check(rules: Rules, anchors, starts, races: bool = False) -> None:
    laid = laid_out(rules, anchors, starts)
    (forward, backward), (plain_forward, plain_backward) = programs(rules, races)
    expected = plain_forward(laid)
    got = forward(laid)
    d_out = jnp.asarray(np.random.default_rng(1).normal(size=expected[0].shape), jnp.float32)
    arrays = dict(logsumexp=expected[1], delta=jnp.sum(expected[0] * d_out, axis=-1), d_out=d_out)
    grads = backward(laid, **arrays)
    if races:
        assert_no_race((got, grads))
    for ours, plain in zip((*got, *grads), (*expected, *plain_backward(laid, **arrays)), strict=True):
        np.testing.assert_allclose(ours, plain, rtol=1e-3, atol=1e-4)


@st.composite
def places(draw):
    """Anchors in order, and starts before them; some blocks see nothing."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    anchors = np.sort(rng.integers(0, draw(st.sampled_from([1, 40, TOKENS])), size=(ROWS, BLOCKS)), axis=1)
    starts = (anchors * rng.random(anchors.shape) * draw(st.sampled_from([0, 1]))).astype(int)
    unkept = rng.random(anchors.shape) < draw(st.sampled_from([0, 0.5, 1]))
    return np.where(unkept, 0, anchors), np.where(unkept, 0, starts)


@settings(max_examples=4, deadline=None)
@given(places())
@pytest.mark.parametrize("rules", RULES, ids=["full", "window"])
def test_the_kernels_equal_plain_xla(rules, place):
    check(rules, *place)


def test_copies_do_not_race():
    anchors = np.sort(np.random.default_rng(2).integers(0, TOKENS, size=(ROWS, BLOCKS)), axis=1)
    check(RULES[0], anchors, anchors // 2, races=True)


def test_the_kernels_are_not_lowered_for_a_cpu():
    x, places = jnp.zeros((1, 1, 2, 1, 8)), jnp.zeros((1, 1), jnp.int32)
    with pytest.raises(ValueError, match="interpret mode"):
        attend_blocks(x, x, x, x[0], x[0], places, places, scale=1.0, implementation="tpu")
