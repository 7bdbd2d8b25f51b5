"""The TPU kernel of attend in TPU interpret mode, against the dense oracle."""

import faulthandler
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Shape, cases
from hypothesis import given, settings
from jax.experimental.pallas import tpu as pltpu
from race_checks import assert_no_race

from pallas_kernels.attention import tpu

SHAPES = [
    # Blocks of 2 pages, tiles of several heads, GQA, tree words, sinks.
    Shape(
        lanes=4, queries=11, keys=11, max_queries=6, max_keys=6, columns=5, page_size=128, kv_heads=2, group=3,
        words=1, sinks=True, head_size=8, platform="tpu",
    ),
    # Several tiles of queries in one lane beside short ones, two tiles of keys, soft cap.
    Shape(
        lanes=3, queries=30, keys=150, max_queries=26, max_keys=140, columns=6, page_size=4, kv_heads=1, group=2,
        words=5, softcap=1.5,
    ),
    # bfloat16 as its bits, rows of two registers.
    Shape(
        lanes=2, queries=10, keys=10, max_queries=8, max_keys=8, columns=3, page_size=8, kv_heads=2, group=1,
        words=1, head_size=256, dtype="bfloat16", scale=0.06,
    ),
]  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def no_endless_waits():
    """A wait for a copy that nobody starts never ends in interpret mode: this ends it."""
    faulthandler.dump_traceback_later(900, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


@functools.cache
def program(shape: Shape, races: bool):
    interpret = pltpu.InterpretParams(
        detect_races=races, dma_execution_mode="eager" if races else "on_wait", out_of_bounds_reads="raise"
    )

    def run(q, k, v, pages, layer, sight, sinks):
        return tpu.attend(
            q, k, v, pages, layer, sight, shape.scale, shape.softcap, sinks, interpret=interpret
        )

    return jax.jit(run)


def check(case: Case, races: bool) -> None:
    tolerance = 2e-2 if case.shape.dtype == "bfloat16" else 1e-4
    got = program(case.shape, races)(*case.arguments())
    if races:
        assert_no_race(got)
    for result, expected in zip(got, case.expected(), strict=True):
        np.testing.assert_allclose(
            np.asarray(result, np.float32), expected, rtol=tolerance, atol=tolerance / 2
        )


@settings(max_examples=24, deadline=None)
@given(cases(SHAPES))
def test_the_kernel_equals_dense_softmax_and_nothing_of_the_padding_leaks(case: Case):
    check(case, races=False)


@settings(max_examples=2, deadline=None)
@given(cases(SHAPES[:1]))
def test_copies_do_not_race(case: Case):
    check(case, races=True)


def test_the_kernel_is_not_lowered_for_a_cpu():
    from test_attend import simple

    from pallas_kernels.attention.api import attend

    q, k, v, pages, layer, sight = simple(page_size=128)
    with pytest.raises(ValueError, match="interpret mode"):
        attend(q, k, v, pages, layer, sight, scale=1.0, implementation="tpu")
    with pytest.raises(ValueError, match="page size that is a multiple of 128"):
        attend(*simple()[:4], layer, sight, scale=1.0, implementation="tpu")
    chosen = attend(q, k, v, pages, layer, sight, scale=1.0)
    plain = attend(q, k, v, pages, layer, sight, scale=1.0, implementation="xla")
    np.testing.assert_array_equal(chosen, plain)
    assert jnp.all(jnp.isfinite(chosen))
