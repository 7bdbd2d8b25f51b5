"""Choices over rows of the vocabulary: the best id, a draw.

Whoever needs one of these uses it from here, so that ties and roundings are the same everywhere.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.first import first_where


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


def draw(weights: Float[Array, "lanes vocabulary"], coins: Float[Array, "lanes"]) -> Int[Array, "lanes"]:
    """The first id whose cumulative weight exceeds coin * total; never one without weight.

    The cumulative weight is summed in blocks, then within the block that the coin falls in: one pass
    over the row, and a smaller rounding error than a running sum.

    Args:
      weights: not normalised, at least 0.
      coins: uniform in [0, 1).

    Returns:
      ids; -1 where the weights sum to 0 or are not numbers.
    """
    blocks = in_blocks(weights)
    total = jnp.cumsum(jnp.sum(blocks, axis=2), axis=1)[:, -1]
    return jnp.where(is_mass(total), find(blocks, coins * total), -1)


def is_mass(total: Float[Array, "lanes"]) -> Bool[Array, "lanes"]:
    """Whether weights that sum to this can be drawn from."""
    return (total > 0) & (total < jnp.inf)


def in_blocks(weights: Float[Array, "lanes items"]) -> Float[Array, "lanes blocks width"]:
    """Rows in the blocks that a draw sums them in, filled up with zeros."""
    lanes, items = weights.shape
    width = min(256, items)
    blocks = -(-items // width)
    return jnp.pad(weights, ((0, 0), (0, blocks * width - items))).reshape(lanes, blocks, width)


def find(blocks: Float[Array, "lanes blocks width"], goal: Float[Array, "lanes"]) -> Int[Array, "lanes"]:
    """The first item whose cumulative weight exceeds the goal; always one with weight, if there is any."""
    lanes, _, width = blocks.shape
    sums = jnp.sum(blocks, axis=2)
    ends = jnp.cumsum(sums, axis=1)
    block = first_past(sums, ends, goal)
    lane = jnp.arange(lanes, dtype=jnp.int32)
    before = jnp.where(block > 0, ends[lane, jnp.maximum(block - 1, 0)], 0)
    inside = blocks[lane, block]
    within = first_past(inside, before[:, None] + jnp.cumsum(inside, axis=1), goal)
    return block * width + within


def first_past(
    weights: Float[Array, "lanes items"], ends: Float[Array, "lanes items"], goal: Float[Array, "lanes"]
) -> Int[Array, "lanes"]:
    """First item with weight whose end is past the goal; the last with weight if rounding leaves none."""
    items = weights.shape[1]
    weighty = weights > 0
    index = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    last = jnp.maximum(jnp.max(jnp.where(weighty, index, -1), axis=1), 0)
    first = first_where(weighty & (ends > goal[:, None]), items)
    return jnp.where(first < items, first, last)
