"""Tempering against its definition with a sort, in plain XLA and by the TPU kernel in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu
from race_checks import assert_no_race

from pallas_kernels.vocabulary_row import reference, tpu
from pallas_kernels.vocabulary_row.api import temper
from pallas_kernels.vocabulary_row.shapes import COMPILED

# temperature, top_k, top_p, min_p; a batch takes some of them.
SETTINGS = [
    (0.0, 3, 0.5, 0.1),
    (1.0, 0, 1.0, 0.0),
    (0.7, 1, 1.0, 0.0),
    (1.0, 5, 1.0, 0.0),
    (2.0, 40, 1.0, 0.0),
    (1.0, 1100, 1.0, 0.0),
    (1.0, 0, 0.9, 0.0),
    (1.5, 0, 0.02, 0.0),
    (1.0, 0, 0.9999, 0.0),
    (1.0, 30, 0.8, 0.0),
    (1.3, 0, 1.0, 0.07),
    (1.0, 200, 0.97, 1e-3),
    (1e-3, 0, 0.95, 0.0),
]
VOCABULARIES = {"xla": (7, 300, 2500), "tpu": (1300,)}  # a whole piece and a rest
ROWS = 11  # a block of 8 and a part of one


@functools.cache
def program(name: str, races: bool = False):
    if name == "xla":
        return jax.jit(reference.temper)
    interpret = pltpu.InterpretParams(
        detect_races=races, dma_execution_mode="eager" if races else "on_wait", out_of_bounds_reads="raise"
    )
    return jax.jit(functools.partial(tpu.temper, interpret=interpret))


def columns(chosen) -> list[jax.Array]:
    return [jnp.asarray(c, t) for c, t in zip(zip(*chosen, strict=True), "fiff", strict=True)]


@st.composite
def batches(draw, name: str):
    """Logits, with ties, forbidden ids and some broken rows, settings and coins."""
    vocabulary = draw(st.sampled_from(VOCABULARIES[name]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    spread = draw(st.sampled_from([0.1, 3.0, 12.0]))
    logits = rng.normal(size=(ROWS, vocabulary)) * spread
    if draw(st.booleans()):
        logits = np.round(logits * 4 / spread) * spread / 4
    logits[rng.random(logits.shape) < draw(st.sampled_from([0.0, 0.5, 0.99]))] = -np.inf
    logits = logits.astype(np.float32)
    chosen = draw(st.lists(st.sampled_from(SETTINGS), min_size=ROWS, max_size=ROWS))
    coins = rng.random(ROWS).astype(np.float32)
    coins[:3] = [0, 1 - 2**-24, 2**-24]
    broken = draw(st.sampled_from([np.nan, np.inf, -np.inf, None]))
    if broken is not None:
        logits[4, :] = broken if broken < 0 else logits[4]
        logits[4, rng.integers(vocabulary)] = broken
    return logits, chosen, coins


def check_row(x, setting, coin, scaled, log_normaliser, floor, drawn) -> None:
    """The definition in float64: what ties is decided by the float32 numbers, what sums by exact ones."""
    temperature, top_k, top_p, min_p = setting
    distribution = not np.isnan(x).any() and np.isfinite(x.max())
    if temperature == 0:
        np.testing.assert_array_equal(scaled, x)
        assert (log_normaliser, floor) == (0, -np.inf)
        usable = not np.isnan(x).any() and x.max() > -np.inf
        assert drawn == (np.argmax(x) if usable else -1)
        return
    if not distribution:
        assert drawn == -1
        return
    np.testing.assert_allclose(scaled, (x - x.max()) / np.float32(temperature), rtol=1e-6)
    weights = np.exp(scaled.astype(np.float64))
    lowest = -np.inf
    if 0 < top_k < x.size:
        lowest = np.sort(scaled)[-top_k]
    total = weights[scaled >= lowest].sum()
    kept = scaled >= floor
    assert kept[np.argmax(x)]
    if min_p:
        lowest = max(lowest, np.log(np.float32(min_p)))
    if top_p == 1:
        slack = 1e-6 * abs(lowest) if min_p and np.isfinite(lowest) else 0
        assert not (kept & (scaled < lowest - slack)).any()
        assert (kept | (scaled <= lowest + slack) & (scaled != lowest)).all() or lowest == -np.inf
    else:
        assert not (kept & (scaled < lowest - 1e-6 * abs(lowest if np.isfinite(lowest) else 0))).any()
        least = scaled[kept].min()
        slack = 1e-5 * total
        if least < scaled.max():
            assert weights[scaled > least].sum() < top_p * total + slack
        dropped = scaled[~kept & (scaled >= lowest + 1e-6)]
        if dropped.size and dropped.max() > -np.inf:
            assert weights[scaled > dropped.max()].sum() >= top_p * total - slack
    mass = np.where(kept, weights, 0)
    np.testing.assert_allclose(log_normaliser, np.log(mass.sum()), rtol=1e-5, atol=1e-5)
    assert kept[drawn] and mass[drawn] > 0
    ends = np.cumsum(mass)
    goal, slack = coin * ends[-1], 1e-5 * ends[-1]
    assert ends[drawn] - mass[drawn] - slack <= goal <= ends[drawn] + slack


def check(name: str, batch, races: bool = False) -> None:
    logits, chosen, coins = batch
    got = program(name, races)(jnp.asarray(logits), *columns(chosen), jnp.asarray(coins))
    if races:
        assert_no_race(got)
    got = jax.tree.map(np.asarray, got)
    for row, setting in enumerate(chosen):
        check_row(
            logits[row],
            setting,
            coins[row],
            got.logits[row],
            got.log_normaliser[row],
            got.floor[row],
            got.drawn[row],
        )


@settings(max_examples=40, deadline=None)
@given(batches("xla"))
def test_the_reference_keeps_and_draws_what_sorting_would(batch):
    check("xla", batch)


@settings(max_examples=12, deadline=None)
@given(batches("tpu"))
def test_the_kernel_keeps_and_draws_what_sorting_would(batch):
    check("tpu", batch)


@settings(max_examples=2, deadline=None)
@given(batches("tpu"))
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
        temper(*arguments, implementation="gpu")
    with pytest.raises(ValueError, match="interpret mode"):
        temper(*arguments, implementation="tpu")
