"""Choices over rows of the vocabulary: the best id, the floor of a filter, a draw.

Whoever needs one of these uses it from here, so that ties and roundings are the same everywhere.
Nothing sorts the vocabulary.

Where the mesh in use splits the vocabulary, every device looks at its own part, and what they exchange has
the size of the answer. A vocabulary that the devices do not divide is whole on each of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from jspec.first import first_where
from jspec.sharding import MESH_AXES, on_every_device, parts_of

TopK = Callable[[Array, int], tuple[Array, Array] | list[Array]]


def argmax(values: Float[Array, "rows vocabulary"]) -> Int[Array, "rows"]:
    """The id of each row's greatest value, the lowest id on ties; -1 if the row has a NaN or only -inf.

    Two vector loops instead of XLA's argmax, a scalar loop on CPU and five times slower. There, a
    maximum over a long row skips NaN, hence the explicit test.
    """
    top = jnp.max(values, axis=1, keepdims=True)
    vocabulary = values.shape[1]
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    found = jnp.where((values == top) & (values > -jnp.inf), index, vocabulary)
    found = jnp.min(jnp.where(jnp.isnan(values), -1, found), axis=1)
    return jnp.where(found < vocabulary, found, -1)


def largest(
    values: Float[Array, "rows vocabulary"], k: int, *, here: TopK = jax.lax.top_k
) -> tuple[Float[Array, "rows k"], Int[Array, "rows k"]]:
    """The k greatest values of each row and their ids, the lowest id first on ties.

    Args:
      values: float32.
      k: static.
      here: how one device finds its own; with ties as above.
    """
    size = values.shape[1] // parts_of("vocabulary", values.shape[1])
    if size == values.shape[1]:
        best, ids = here(values, k)
        return best, ids
    axis = MESH_AXES["vocabulary"]

    def run(values: Array) -> tuple[Array, Array]:
        best, ids = here(values, min(k, size))
        ids = ids + jax.lax.axis_index(axis) * size
        packed = jnp.stack([jax.lax.bitcast_convert_type(best, jnp.int32), ids])
        bits, ids = jax.lax.all_gather(packed, axis, axis=2, tiled=True)
        # Candidates stand in the order of their devices, so that of equal ones the lowest id comes first.
        best, index = jax.lax.top_k(jax.lax.bitcast_convert_type(bits, jnp.float32), k)
        return best, jnp.take_along_axis(ids, index, axis=1)

    return on_every_device(run, in_specs=PartitionSpec(None, axis), out_specs=PartitionSpec())(values)


def draw(weights: Float[Array, "lanes vocabulary"], coins: Float[Array, "lanes"]) -> Int[Array, "lanes"]:
    """The first id whose cumulative weight exceeds coin * total; never one without weight.

    The cumulative weight is summed in blocks, then within the block that the coin falls in: one pass
    over the row, and a smaller rounding error than a running sum. Devices that share the row sum their parts
    first, so that a coin next to an edge may fall to the other side of it than on one device.

    Args:
      weights: not normalised, at least 0.
      coins: uniform in [0, 1).

    Returns:
      ids; -1 where the weights sum to 0 or are not numbers.
    """
    size = weights.shape[1] // parts_of("vocabulary", weights.shape[1])
    if size == weights.shape[1]:
        blocks = _blocks(weights)
        total = jnp.cumsum(jnp.sum(blocks, axis=2), axis=1)[:, -1]
        return jnp.where(_is_mass(total), _find(blocks, coins * total), -1)
    axis = MESH_AXES["vocabulary"]

    def run(weights: Array, coins: Array) -> Array:
        blocks = _blocks(weights)
        masses = jax.lax.all_gather(jnp.sum(blocks, axis=(1, 2)), axis, axis=1)
        ends = jnp.cumsum(masses, axis=1)
        goal = coins * ends[:, -1]
        part, mine = _first_past(masses, ends, goal), jax.lax.axis_index(axis)
        before = jnp.where(mine > 0, ends[:, jnp.maximum(mine - 1, 0)], 0)
        found = jnp.where(part == mine, mine * size + _find(blocks, goal - before), 0)
        return jnp.where(_is_mass(ends[:, -1]), jax.lax.psum(found, axis), -1)

    whole = PartitionSpec()
    run = on_every_device(run, in_specs=(PartitionSpec(None, axis), whole), out_specs=whole)
    return run(weights, coins)


def _is_mass(total: Float[Array, "lanes"]) -> Bool[Array, "lanes"]:
    return (total > 0) & (total < jnp.inf)


def _blocks(weights: Float[Array, "lanes items"]) -> Float[Array, "lanes blocks width"]:
    lanes, items = weights.shape
    width = min(256, items)
    blocks = -(-items // width)
    return jnp.pad(weights, ((0, 0), (0, blocks * width - items))).reshape(lanes, blocks, width)


def _find(blocks: Float[Array, "lanes blocks width"], goal: Float[Array, "lanes"]) -> Int[Array, "lanes"]:
    """The first item whose cumulative weight exceeds the goal."""
    lanes, _, width = blocks.shape
    sums = jnp.sum(blocks, axis=2)
    ends = jnp.cumsum(sums, axis=1)
    block = _first_past(sums, ends, goal)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    before = jnp.where(block > 0, ends[lane, jnp.maximum(block - 1, 0)], 0)
    inside = blocks[lane, block]
    within = _first_past(inside, before[:, None] + jnp.cumsum(inside, axis=1), goal)
    return block * width + within


def _first_past(
    weights: Float[Array, "lanes items"], ends: Float[Array, "lanes items"], goal: Float[Array, "lanes"]
) -> Int[Array, "lanes"]:
    """First item with weight whose end is past the goal; the last with weight if rounding leaves none."""
    items = weights.shape[1]
    weighty = weights > 0
    index = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.maximum(jnp.max(jnp.where(weighty, index, -1), axis=1), 0)
    first = first_where(weighty & (ends > goal[:, None]), items)
    return jnp.where(first < items, first, last)


def filter_floor(
    logits: Float[Array, "rows vocabulary"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    candidates: int = 64,
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
    """
    vocabulary = logits.shape[1]
    candidates = min(candidates, vocabulary)
    best = largest(logits, candidates)[0]
    floor = _top_k_floor(logits, best, top_k)
    passes = jnp.where(min_p > 0, jnp.log(min_p), -jnp.inf)
    floor = jax.lax.cond(
        jnp.any(top_p < 1),
        lambda: jnp.maximum(floor, _top_p_floor(logits, best, floor, top_p)),
        lambda: floor,
    )
    return jnp.maximum(floor, passes)


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
