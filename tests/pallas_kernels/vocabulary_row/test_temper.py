"""Tempering against its definition with a sort, in plain XLA and by the TPU kernel in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from jax.experimental.pallas import tpu as pltpu
from race_checks import assert_no_race
from row_cases import ROWS, SETTINGS, batches, check_rows, columns

from pallas_kernels.vocabulary_row import reference, tpu
from pallas_kernels.vocabulary_row.api import temper
from pallas_kernels.vocabulary_row.shapes import COMPILED

VOCABULARIES = {"xla": (7, 300, 2500), "tpu": (1300,)}  # a whole piece and a rest


@functools.cache
def program(name: str, races: bool = False):
    if name == "xla":
        return jax.jit(reference.temper)
    interpret = pltpu.InterpretParams(
        detect_races=races, dma_execution_mode="eager" if races else "on_wait", out_of_bounds_reads="raise"
    )
    return jax.jit(functools.partial(tpu.temper, interpret=interpret))


def check(name: str, batch, races: bool = False) -> None:
    logits, chosen, coins = batch
    got = program(name, races)(jnp.asarray(logits), *columns(chosen), jnp.asarray(coins))
    if races:
        assert_no_race(got)
    check_rows(batch, got)


@settings(max_examples=40, deadline=None)
@given(batches(VOCABULARIES["xla"]))
def test_the_reference_keeps_and_draws_what_sorting_would(batch):
    check("xla", batch)


@settings(max_examples=12, deadline=None)
@given(batches(VOCABULARIES["tpu"]))
def test_the_kernel_keeps_and_draws_what_sorting_would(batch):
    check("tpu", batch)


@settings(max_examples=2, deadline=None)
@given(batches(VOCABULARIES["tpu"]))
def test_copies_do_not_race(batch):
    check("tpu", batch, races=True)


@pytest.mark.parametrize("name", ["xla", "tpu"])
def test_broken_rows_and_padding_change_no_other_row(name):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(ROWS, 1300)).astype(np.float32) * 3
    arguments = [*columns(SETTINGS[2 : 2 + ROWS]), jnp.asarray(rng.random(ROWS), jnp.float32)]
    clean = program(name)(jnp.asarray(logits), *arguments)
    for broken in (np.nan, np.inf, -np.inf):
        logits[[3, 9]] = broken
        got = program(name)(jnp.asarray(logits), *arguments)
        keep = np.delete(np.arange(ROWS), [3, 9])
        jax.tree.map(lambda a, b, k=keep: np.testing.assert_array_equal(a[k], b[k]), got, clean)


def test_without_coins_nothing_is_drawn():
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(8, 7)), jnp.float32)  # in place, one piece
    for name in ("xla", "tpu"):
        arguments = logits, *columns(SETTINGS[3:11])
        with_coins = program(name)(*arguments, jnp.zeros((8,)))
        without = program(name)(*arguments, None)
        assert without.drawn is None
        np.testing.assert_array_equal(without.floor, with_coins.floor)
        np.testing.assert_array_equal(without.log_normaliser, with_coins.log_normaliser)


@pytest.mark.parametrize("name", ["nodes", "plain", "one row"])
def test_the_reference_sorts_no_row(name):
    shape = COMPILED[name]
    lowered = jax.jit(reference.temper, static_argnums=()).lower(
        *jax.eval_shape(shape.arguments), *([] if shape.draws else [None])
    )
    ranked = [
        line for line in lowered.as_text().splitlines() if "chlo.top_k" in line or "stablehlo.sort" in line
    ]
    assert ranked and not [line for line in ranked if f"x{shape.vocabulary}x" in line]


def test_an_implementation_that_cannot_be_had_is_refused():
    arguments = jnp.zeros((2, 5)), *columns(SETTINGS[:2])
    with pytest.raises(ValueError, match="implementation: expected None"):
        temper(*arguments, implementation="cuda")
    with pytest.raises(ValueError, match="interpret mode"):
        temper(*arguments, implementation="tpu")
