"""The law of what verification emits, by enumerating drafts and coins.

The target is a table: the next token's probabilities depend on the last token only, and are
multiples of 1/16. Drafts of two tokens are drawn from tables whose probabilities are powers of two, so
every acceptance and every final draw changes at a multiple of the coin grid's step: summed over the
midpoints of the grid, the emitted law is exact.
"""

import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from jspec.coins import Coins
from jspec.round import Dense, OneHot, Proposal, Sparse
from jspec.target_rows import TargetRows

V = 8
ANCHOR = 0
# P[last] is the target's row after `last`, in sixteenths; zeros where the target never goes.
P = (
    np.asarray(
        [
            [4, 6, 1, 3, 2, 0, 0, 0],
            [0, 8, 2, 2, 0, 4, 0, 0],
            [1, 1, 4, 0, 4, 0, 6, 0],
            [16, 0, 0, 0, 0, 0, 0, 0],
            [2, 2, 2, 2, 2, 2, 2, 2],
            [0, 0, 0, 4, 0, 4, 0, 8],
            [6, 0, 4, 0, 6, 0, 0, 0],
            [0, 1, 0, 0, 0, 0, 0, 15],
        ]
    )
    / 16
)
# Q[last]: the drafter's row after `last`, in eighths, over ids 6, 1, 3 and 0. What remains of P in
# sixteenths, max(P - Q, 0), sums to a divisor of 240, the steps of the final draw's coin.
DRAFT_IDS = (6, 1, 3, 0)
Q = np.zeros((V, V))
for last, eighths in enumerate([(2, 4, 1, 1), (0, 8, 0, 0), (2, 2, 2, 2), (4, 0, 0, 4)] * 2):
    Q[last, list(DRAFT_IDS)] = np.asarray(eighths) / 8
# A drafter that always says the same, by last token: its q is one-hot.
SAYS = np.asarray([1, 5, 6, 0, 0, 7, 0, 7])


def rows_after(paths: np.ndarray, probs: np.ndarray = P) -> TargetRows:
    """Rows of the anchor and of each draft token, for every path."""
    lasts = np.concatenate([np.full((len(paths), 1), ANCHOR), paths], axis=1)
    with np.errstate(divide="ignore"):
        logits = np.log(probs[lasts]).reshape(-1, probs.shape[1])
    zeros = jnp.zeros((len(logits),), jnp.float32)
    return TargetRows(
        logits=jnp.asarray(logits, jnp.float32),
        log_normaliser=zeros,
        floor=zeros - jnp.inf,
        starts=jnp.arange(len(paths), dtype=jnp.int32) * lasts.shape[1],
    )


def proposal_of(paths: np.ndarray, lengths: np.ndarray, kind: str) -> Proposal:
    """The paths as chains with their q said in one of four ways."""
    lanes, drafts = paths.shape
    lasts = np.concatenate([np.full((lanes, 1), ANCHOR), paths], axis=1)[:, :-1]
    q_rows = jnp.asarray(Q[lasts], jnp.float32)
    ids = jnp.asarray(DRAFT_IDS, jnp.int32)
    match kind:
        case "one-hot":
            q = OneHot()
        case "dense":
            q = Dense(probs=q_rows, ids=None)
        case "reduced":
            q = Dense(probs=q_rows[:, :, ids], ids=ids)
        case "sparse":
            q = Sparse(ids=jnp.broadcast_to(ids, (lanes, drafts, len(DRAFT_IDS))), probs=q_rows[:, :, ids])
    return Proposal(
        tokens=jnp.asarray(paths, jnp.int32),
        lengths=jnp.asarray(lengths, jnp.int32),
        q=q,
    )


def drafted(kind: str, drafts: int = 2) -> tuple[np.ndarray, np.ndarray]:
    """Every path that the drafter may propose, and its probability."""
    paths, weights = [], []
    for path in itertools.product(range(V), repeat=drafts):
        weight = 1.0
        for last, token in itertools.pairwise((ANCHOR, *path)):
            weight *= float(SAYS[last] == token) if kind == "one-hot" else Q[last, token]
        if weight:
            paths.append(path)
            weights.append(weight)
    return np.asarray(paths), np.asarray(weights)


def emitted_law(rule: Callable, kind: str, lengths: Callable, verify_lengths: Callable) -> np.ndarray:
    """P(next three tokens) when `rule` verifies drafts of two and the target goes on by itself.

    Args:
      rule: (proposal, rows, verify_lengths, coins) -> (accept_length, bonus).
      kind: how q is said.
      lengths: path -> how many of its tokens are proposed; the others are placeholders.
      verify_lengths: path -> how many are verified; may look at a token only to decide about later ones.
    """
    paths, weights = drafted(kind)
    accept_steps, bonus_steps = (16 if kind == "one-hot" else 8), 240
    tosses = [(np.arange(steps) + 0.5) / steps for steps in (accept_steps, accept_steps, bonus_steps)]
    first, second, last = (grid.ravel() for grid in np.meshgrid(*tosses, indexing="ij"))
    every = np.repeat(np.arange(len(paths)), len(first))
    coins = Coins(
        accept=jnp.asarray(np.tile(np.stack([first, second], axis=1), (len(paths), 1)), jnp.float32),
        bonus=jnp.asarray(np.tile(last, len(paths)), jnp.float32),
    )
    rows = rows_after(paths)
    rows = TargetRows(
        logits=rows.logits, log_normaliser=rows.log_normaliser, floor=rows.floor, starts=rows.starts[every]
    )
    proposed = np.asarray([lengths(path) for path in paths])
    verified = np.asarray([verify_lengths(path) for path in paths])
    proposal = proposal_of(paths[every], proposed[every], kind)
    accept_length, bonus = jax.jit(rule)(proposal, rows, jnp.asarray(verified[every], jnp.int32), coins)
    return complete(paths[every], np.asarray(accept_length), np.asarray(bonus), weights[every] / len(first))


def complete(
    paths: np.ndarray, accept_length: np.ndarray, bonus: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Law of the first three tokens: what was emitted, then the target by itself."""
    law = np.zeros((V, V, V))
    for length in range(paths.shape[1] + 1):
        mine = accept_length == length
        tokens = np.concatenate([paths[mine, :length], bonus[mine, None]], axis=1)[:, :3]
        part = np.zeros((V,) * tokens.shape[1])
        np.add.at(part, tuple(tokens.T), weights[mine])
        while part.ndim < 3:
            part = part[..., None] * P
        law += part
    return law


def target_law() -> np.ndarray:
    """P(next three tokens) of the target itself."""
    return P[ANCHOR][:, None, None] * P[:, :, None] * P[None, :, :]


def assert_follows(counts: np.ndarray, law: np.ndarray) -> None:
    """Chi-square test of counts against a law, at p = 0.001; what the law excludes must not occur."""
    counts, expected = counts.ravel(), law.ravel() * counts.sum()
    assert not counts[expected == 0].any(), "a token without probability was emitted"
    # Rare outcomes are pooled: the statistic needs a few expected counts in each cell.
    common = expected >= 10
    seen = np.append(counts[common], counts[~common].sum())
    wanted = np.append(expected[common], expected[~common].sum())
    seen, wanted = seen[wanted > 0], wanted[wanted > 0]
    statistic, freedom = np.sum((seen - wanted) ** 2 / wanted), len(wanted) - 1
    # Wilson and Hilferty's approximation of the quantile.
    limit = freedom * (1 - 2 / (9 * freedom) + 3.09 * np.sqrt(2 / (9 * freedom))) ** 3
    assert statistic < limit, (
        f"chi-square {statistic:.1f} with {freedom} degrees of freedom, limit {limit:.1f}"
    )


def count_blocks(
    paths: np.ndarray, accept_length: np.ndarray, bonus: np.ndarray, table: Callable
) -> np.ndarray:
    """Counts of the first three tokens; what a round did not emit is drawn from the target.

    `table` maps the tokens so far [n, k] to the target's probabilities [n, V].
    """
    rng = np.random.default_rng(7)
    block = np.concatenate([paths, np.zeros((len(paths), 4), paths.dtype)], axis=1)
    block[np.arange(len(paths)), accept_length] = bonus
    for place in range(3):
        absent = np.flatnonzero(accept_length < place)
        if len(absent):
            ends = np.cumsum(table(block[absent, :place]), axis=1)
            draws = rng.random((len(absent), 1)) * ends[:, -1:]
            block[absent, place] = np.argmax(ends > draws, axis=1)
    counts = np.zeros((V, V, V))
    np.add.at(counts, tuple(block[:, :3].T), 1)
    return counts
