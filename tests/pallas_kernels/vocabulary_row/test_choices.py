"""Choices over vocabulary rows: best id, floors of filters, draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels.vocabulary_row.choices import argmax, draw
from pallas_kernels.vocabulary_row.filters import filter_floor

NAN, INF = np.nan, np.inf


def test_lowest_id_wins_ties():
    values = jnp.asarray(
        [[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0], [-0.0, 0.0, -1.0, -INF], [-5.0, -INF, -4.0, -4.0]]
    )
    np.testing.assert_array_equal(argmax(values), [1, 0, 0, 2])


def test_row_without_a_best_id_gives_minus_one():
    values = jnp.asarray(
        [[1.0, NAN, 3.0], [-INF, -INF, -INF], [0.0, INF, 1.0], [NAN, NAN, NAN], [5.0, 1.0, 2.0]]
    )
    np.testing.assert_array_equal(argmax(values), [-1, -1, 1, -1, 0])


def test_nan_in_a_long_row_is_not_skipped():
    # A maximum over a long row ignores NaN on CPU: an argmax built on it would return a valid-looking id.
    values = np.zeros((3, 49152), np.float32)
    values[1, 333] = NAN
    values[2, 40000] = 1
    np.testing.assert_array_equal(jax.jit(argmax)(jnp.asarray(values)), [0, -1, 40000])


def test_draw_takes_the_first_id_past_the_coin():
    weights = jnp.asarray([[0.0, 2.0, 0.0, 6.0]] * 5)
    coins = jnp.asarray([0.0, 0.2499, 0.25, 0.9, 1 - 2**-24])
    np.testing.assert_array_equal(draw(weights, coins), [1, 1, 3, 3, 3])


def test_draw_from_nothing_is_minus_one():
    weights = jnp.asarray([[0.0, 0.0], [NAN, 1.0], [INF, 1.0], [0.0, 1.0]])
    np.testing.assert_array_equal(draw(weights, jnp.full((4,), 0.5)), [-1, -1, -1, 1])


@pytest.mark.parametrize("vocabulary", [7, 256, 1000, 49152])
def test_draw_never_returns_an_id_without_weight(vocabulary):
    rng = np.random.default_rng(vocabulary)
    weights = rng.exponential(size=(64, vocabulary)) ** 4 * (rng.random((64, vocabulary)) < 0.05)
    weights[:, 3] = 1e-3
    weights[:, -2:] = 0
    coins = rng.random(64)
    coins[:4] = [0, 1 - 2**-24, 1 - 2**-23, 2**-24]
    ids = np.asarray(jax.jit(draw)(jnp.asarray(weights, jnp.float32), jnp.asarray(coins, jnp.float32)))
    assert (weights[np.arange(64), ids] > 0).all()
    exact = np.cumsum(weights, axis=1)
    below, above = np.where(ids > 0, exact[np.arange(64), ids - 1], 0), exact[np.arange(64), ids]
    slack = 1e-5 * exact[:, -1]
    assert (below - slack <= coins * exact[:, -1]).all() and (coins * exact[:, -1] <= above + slack).all()


def kept_by_sorting(logits: np.ndarray, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The definition, in float64 with a sort: strictly greater mass decides, ties stay together."""
    probs = np.exp(logits.astype(np.float64))
    kept = np.ones(logits.shape, bool)
    if top_k:
        kept &= logits >= np.sort(logits)[::-1][min(top_k, logits.size) - 1]
    if top_p < 1:
        total = probs[kept].sum()
        above = np.array([probs[logits > logit].sum() for logit in logits])
        kept &= (above < top_p * total) | (logits == logits.max())
    return kept & (probs >= min_p * probs.max() * (1 - 1e-6))


# One row per case; the floors of four candidates and a bisected rest must be those of the definition.
CASES = [
    (0, 1.0, 0.0),
    (1, 1.0, 0.0),
    (3, 1.0, 0.0),
    (11, 1.0, 0.0),
    (40, 1.0, 0.0),
    (0, 0.03, 0.0),
    (0, 0.51, 0.0),
]
CASES += [
    (0, 0.937, 0.0),
    (0, 0.99993, 0.0),
    (7, 0.618, 0.0),
    (2, 0.773, 0.0),
    (0, 1.0, 0.13),
    (9, 0.87, 0.06),
]


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.1, 1.0, 3.0, 10.0]),
    steps=st.sampled_from([0, 3, 20]),
)
def test_filters_keep_what_sorting_would(seed, spread, steps):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(len(CASES), 40)) * spread
    if steps:  # coarse values, so that many tokens tie
        logits = np.round(logits * steps / spread) * spread / steps
    logits[:, rng.integers(40)] = -INF
    logits = (logits - logits.max(axis=1, keepdims=True)).astype(np.float32)
    top_k, top_p, min_p = (jnp.asarray(column) for column in zip(*CASES, strict=True))
    for candidates in (4, 64):
        floor = np.asarray(floors(jnp.asarray(logits), top_k, top_p, min_p, candidates))
        for row, case in enumerate(CASES):
            kept = (logits[row] >= floor[row]) & (logits[row] > -INF)
            expected = kept_by_sorting(logits[row], *case) & (logits[row] > -INF)
            np.testing.assert_array_equal(kept, expected, err_msg=f"{case}, {candidates} candidates")


floors = jax.jit(filter_floor, static_argnames="candidates")


def test_all_ties_at_the_floor_are_kept():
    logits = jnp.asarray([[0.0, -1.0, -1.0, -1.0, -2.0]] * 3)
    floor = filter_floor(logits, jnp.asarray([2, 0, 0]), jnp.asarray([1.0, 0.6, 0.4]), jnp.zeros((3,)))
    np.testing.assert_array_equal(
        np.asarray(logits) >= np.asarray(floor)[:, None], [[1, 1, 1, 1, 0]] * 2 + [[1, 0, 0, 0, 0]]
    )


def test_top_p_stops_where_the_mass_above_reaches_it_exactly():
    logits = jnp.log(jnp.asarray([[1.0, 0.5, 0.25, 0.25]]))  # probabilities 1/2, 1/4, 1/8, 1/8
    for top_p, kept in [(0.5, 1), (0.500001, 2), (0.75, 2), (0.76, 4), (1e-30, 1)]:
        floor = filter_floor(logits, jnp.zeros((1,), jnp.int32), jnp.asarray([top_p]), jnp.zeros((1,)))
        assert int(np.sum(np.asarray(logits) >= np.asarray(floor))) == kept, top_p


def test_broken_row_does_not_change_the_floors_of_others():
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(3, 300)).astype(np.float32)
    logits -= logits.max(axis=1, keepdims=True)
    arguments = jnp.asarray([0, 100, 0]), jnp.asarray([0.9, 0.8, 0.7]), jnp.asarray([0.0, 0.0, 0.01])
    clean = np.asarray(floors(jnp.asarray(logits), *arguments))
    for broken in (NAN, -INF, INF):
        logits[1] = broken
        with_broken = np.asarray(floors(jnp.asarray(logits), *arguments))
        np.testing.assert_array_equal(with_broken[[0, 2]], clean[[0, 2]])
