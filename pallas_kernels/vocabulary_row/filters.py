"""The floor under a row of logits that top-k, top-p and min-p leave. The vocabulary is never sorted."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Greatest = Callable[[Array, int], Array]  # rows [rows, vocabulary], count to [rows, count], descending


def filter_floor(
    logits: Float[Array, "rows vocabulary"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    candidates: int = 64,
    greatest_of: Greatest | None = None,
) -> Float[Array, "rows"]:
    """The least logit that each row's filters keep: a token is kept iff its logit is at least that.

    top-k first, then top-p on the mass that top-k kept, then min-p. All tokens that tie at the floor are
    kept, so top-k may keep more than k. A token with logit t passes top-p iff the mass strictly above t is
    less than top_p: the smallest set that holds top_p, plus ties. The best token is always kept.

    Usually the `candidates` best tokens decide; rows that need more (a larger k, a flat row under top-p) are
    bisected. Which of the two is decided for each row by that row alone.

    Args:
      logits: with each row's maximum at 0.
      top_k: tokens to keep, 0 = all.
      top_p: mass to keep, 1 = all.
      min_p: least kept probability relative to the best token's, 0 = all.
      candidates: static; how many of the best tokens are looked at first.
      greatest_of: how they are found; None = `greatest`.
    """
    best = (greatest_of or greatest)(logits, min(candidates, logits.shape[1]))
    floor = _top_k_floor(logits, best, top_k)
    passes = jnp.where(min_p > 0, jnp.log(min_p), -jnp.inf)
    floor = jax.lax.cond(
        jnp.any(top_p < 1),
        lambda: jnp.maximum(floor, _top_p_floor(logits, best, floor, top_p)),
        lambda: floor,
    )
    return jnp.maximum(floor, passes)


def greatest(logits: Float[Array, "rows vocabulary"], count: int) -> Float[Array, "rows count"]:
    """The `count` greatest logits of each row, descending; a row with NaN has anything.

    Ids with the same remainder are a column. Each of the greatest is in one of the `count` columns with the
    greatest maxima, so that maxima and members of few columns are ranked, and not the vocabulary.
    """
    rows, vocabulary = logits.shape
    height = max(1, round((vocabulary / count) ** 0.5))
    columns = -(-vocabulary // height)
    if columns <= count:
        return jax.lax.top_k(logits, count)[0]
    spare = height * columns - vocabulary
    by_column = jnp.pad(logits, ((0, 0), (0, spare)), constant_values=-jnp.inf)
    by_column = by_column.reshape(rows, height, columns)
    _, chosen = jax.lax.top_k(jnp.max(by_column, axis=1), count)
    # Members are taken from the row itself, as the filled up one then need not be in memory.
    ids = (chosen[:, None] + columns * jnp.arange(height, dtype=jnp.int32)[None, :, None]).reshape(rows, -1)
    members = jnp.take_along_axis(logits, jnp.minimum(ids, vocabulary - 1), axis=1)
    return jax.lax.top_k(jnp.where(ids < vocabulary, members, -jnp.inf), count)[0]


def _top_k_floor(
    logits: Float[Array, "rows vocabulary"], best: Float[Array, "rows candidates"], top_k: Int[Array, "rows"]
) -> Float[Array, "rows"]:
    """The k-th greatest logit; -inf where k is 0 or spans the vocabulary."""
    candidates = best.shape[1]
    filtered = (top_k > 0) & (top_k < logits.shape[1])
    kth = jnp.take_along_axis(best, jnp.clip(top_k - 1, 0, candidates - 1)[:, None], axis=1)[:, 0]
    further = filtered & (top_k > candidates)

    def bisected() -> Float[Array, "rows"]:
        def few_above(floor: Float[Array, "rows"]) -> Bool[Array, "rows"]:
            return jnp.sum(logits > floor[:, None], axis=1, dtype=jnp.int32) < top_k

        lowest = jnp.full(top_k.shape, -jnp.inf, jnp.float32)
        return _least_passing(few_above, lowest, best[:, -1], further)

    kth = jax.lax.cond(jnp.any(further), lambda: jnp.where(further, bisected(), kth), lambda: kth)
    return jnp.where(filtered, kth, -jnp.inf)


def _top_p_floor(
    logits: Float[Array, "rows vocabulary"],
    best: Float[Array, "rows candidates"],
    top_k_floor: Float[Array, "rows"],
    top_p: Float[Array, "rows"],
) -> Float[Array, "rows"]:
    """The least logit t with mass(> t) < top_p * mass(>= top_k_floor)."""
    vocabulary = logits.shape[1]
    total = jnp.sum(jnp.where(logits >= top_k_floor[:, None], jnp.exp(logits), 0), axis=1)
    goal = jnp.where(top_p < 1, top_p * total, jnp.inf)
    # above[r, i]: mass of the candidates strictly greater than candidate i.
    greater = best[:, None, :] > best[:, :, None]
    above = jnp.sum(jnp.where(greater, jnp.exp(best)[:, None, :], 0), axis=2)
    passing = (above < goal[:, None]).at[:, 0].set(True)
    floor = jnp.min(jnp.where(passing, best, jnp.inf), axis=1)
    decided = ~passing[:, -1] | (top_k_floor >= best[:, -1]) | (best.shape[1] == vocabulary) | (top_p >= 1)

    def bisected() -> Float[Array, "rows"]:
        def little_above(floor: Float[Array, "rows"]) -> Bool[Array, "rows"]:
            return jnp.sum(jnp.where(logits > floor[:, None], jnp.exp(logits), 0), axis=1) < goal

        # All tokens at or below log((1 - p) total / V) together hold less than 1 - p of the mass.
        lowest = jnp.log((1 - top_p) * total / vocabulary) - 1
        return _least_passing(little_above, lowest, best[:, -1], ~decided)

    floor = jax.lax.cond(jnp.all(decided), lambda: floor, lambda: jnp.where(decided, floor, bisected()))
    return jnp.where(top_p < 1, floor, -jnp.inf)


def _least_passing(
    passes: Callable[[Float[Array, "rows"]], Bool[Array, "rows"]],
    low: Float[Array, "rows"],
    high: Float[Array, "rows"],
    wanted: Bool[Array, "rows"],
) -> Float[Array, "rows"]:
    """The least float32 in (low, high] that passes, where all floats above one that passes do too.

    Bisects the integers that order floats as the floats themselves: at most 32 steps, and exact.
    """
    low, high = _ordered(low), _ordered(high)
    low = jnp.where(wanted, low, high)

    def halve(bracket: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bracket
        middle = low + (high - low) // 2
        passing = passes(_from_ordered(middle))
        return jnp.where(passing, low, middle), jnp.where(passing, middle, high)

    return _from_ordered(jax.lax.while_loop(lambda b: jnp.any(b[1] - b[0] > 1), halve, (low, high))[1])


def _ordered(values: Float[Array, "rows"]) -> Int[Array, "rows"]:
    """Integers in the order of the floats; -0.0 comes just below 0.0."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _from_ordered(integers: Int[Array, "rows"]) -> Float[Array, "rows"]:
    bits = jnp.where(integers < 0, integers ^ 0x7FFFFFFF, integers)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
