"""Rows to be tempered, with settings and coins, and what a tempered row must be: the definition with a sort."""

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from pallas_kernels.vocabulary_row.tempered import Tempered

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
ROWS = 11  # a block of 8 and a part of one


def columns(chosen) -> list[jax.Array]:
    return [jnp.asarray(c, t) for c, t in zip(zip(*chosen, strict=True), "fiff", strict=True)]


@st.composite
def batches(draw, vocabularies: tuple[int, ...]):
    """Logits, with ties, forbidden ids and some broken rows, settings and coins."""
    vocabulary = draw(st.sampled_from(vocabularies))
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


def check_rows(batch, got: Tempered) -> None:
    """Every row of a batch."""
    logits, chosen, coins = batch
    got = jax.tree.map(np.asarray, got)
    assert got.drawn is not None
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
