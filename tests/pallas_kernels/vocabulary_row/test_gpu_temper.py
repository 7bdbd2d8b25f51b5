"""The Mosaic GPU kernel of tempering in the interpreter, against the definition with a sort, and lowered for a GPU."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas import mosaic_gpu as plgpu
from row_cases import ROWS, SETTINGS, batches, check_rows, columns

from pallas_kernels.vocabulary_row import gpu
from pallas_kernels.vocabulary_row.api import temper
from pallas_kernels.vocabulary_row.shapes import COMPILED

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="Mosaic GPU kernels are interpreted by jax 0.12 and newer"
)

VOCABULARIES = (7, 2048, 4501)  # less than a piece, exactly one, and a last one that begins in the one before


@functools.cache
def program(races: bool = False):
    # Made here: jax 0.10 has no such parameters.
    interpret = plgpu.InterpretGPUParams(detect_races=races)  # pyright: ignore[reportAttributeAccessIssue]
    return jax.jit(functools.partial(gpu.temper, interpret=interpret))


def check(batch, races: bool = False) -> None:
    logits, chosen, coins = batch
    check_rows(batch, program(races)(jnp.asarray(logits), *columns(chosen), jnp.asarray(coins)))


@interpreted
@settings(max_examples=12, deadline=None)
@given(batches(VOCABULARIES))
def test_the_gpu_kernel_keeps_and_draws_what_sorting_would(batch):
    check(batch)


@interpreted
@settings(max_examples=2, deadline=None)
@given(batches(VOCABULARIES[-1:]))
def test_rows_do_not_race(batch):
    check(batch, races=True)


@interpreted
def test_broken_rows_change_no_other_row():
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, 4501)).astype(np.float32) * 3
    arguments = [*columns(SETTINGS[2 : 2 + ROWS]), jnp.asarray(rng.random(ROWS), jnp.float32)]
    clean = program()(jnp.asarray(logits), *arguments)
    for broken in (np.nan, np.inf, -np.inf):
        logits[[3, 9]] = broken
        got = program()(jnp.asarray(logits), *arguments)
        keep = np.delete(np.arange(ROWS), [3, 9])
        jax.tree.map(lambda a, b, k=keep: np.testing.assert_array_equal(a[k], b[k]), got, clean)


@interpreted
def test_without_coins_the_gpu_kernel_draws_nothing():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, 4501)), jnp.float32)
    arguments = logits, *columns(SETTINGS[2 : 2 + ROWS])
    with_coins = program()(*arguments, jnp.zeros((ROWS,)))
    without = program()(*arguments, None)
    assert without.drawn is None
    np.testing.assert_array_equal(without.floor, with_coins.floor)
    np.testing.assert_array_equal(without.log_normaliser, with_coins.log_normaliser)


def lowered(name: str, implementation: str | None) -> str:
    shapes = jax.eval_shape(COMPILED[name].arguments)
    run = functools.partial(temper, implementation=implementation)
    return jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


@interpreted
@pytest.mark.parametrize("name", ["nodes", "odd"])
def test_the_gpu_kernel_is_lowered(name):
    assert "mosaic_gpu" in lowered(name, "gpu")


def test_a_gpu_gets_plain_xla_unless_the_kernel_is_asked_for():
    assert "mosaic_gpu" not in lowered("odd", None)


@interpreted
def test_logits_in_another_type_are_refused():
    with pytest.raises(ValueError, match="logits: expected float32"):
        temper(jnp.zeros((2, 5), jnp.bfloat16), *columns(SETTINGS[:2]), implementation="gpu")


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this jax has what the kernel needs")
def test_an_older_jax_is_refused():
    with pytest.raises(ValueError, match="or newer"):
        temper(jnp.zeros((2, 5)), *columns(SETTINGS[:2]), implementation="gpu")
