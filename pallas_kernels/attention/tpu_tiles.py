"""Which tile of queries the TPU kernel of attention takes when, and what it needs."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.attention.tpu_call import Call

_NEVER = 2**31 - 1  # no position is behind it


class Tile(NamedTuple):
    """Some queries of one lane; `lane` is the number of lanes behind the last tile, which is empty."""

    lane: jax.Array
    first: jax.Array  # number of its first query within the lane
    count: jax.Array  # its queries
    lowest: jax.Array  # the least first_visible
    begin: jax.Array  # columns of the page table that it needs
    end: jax.Array


def next_lane(call: Call, lane: jax.Array) -> jax.Array:
    """The first lane from `lane` on that has queries; the number of lanes if none has."""

    def empty(l: jax.Array) -> jax.Array:
        return (l < call.lanes) & (lane_length(call, call.scalars.query_offsets, l) == 0)

    return jax.lax.while_loop(empty, lambda l: l + 1, lane)


def lane_length(call: Call, offsets: Any, lane: jax.Array) -> jax.Array:
    lane = jnp.minimum(lane, call.lanes - 1)
    return offsets[lane + 1] - offsets[lane]


def tile_behind(call: Call, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Lane and first query of the next tile."""
    first = tile.first + call.tiling.queries
    more = first < lane_length(call, call.scalars.query_offsets, tile.lane)
    lane = next_lane(call, jnp.where(more, tile.lane, tile.lane + 1))
    return lane, jnp.where(more, first, 0)


def describe(call: Call, lane: jax.Array, first: jax.Array) -> Tile:
    real = lane < call.lanes
    bounded = jnp.minimum(lane, call.lanes - 1)
    start = call.scalars.query_offsets[bounded] + first
    count = jnp.minimum(call.tiling.queries, lane_length(call, call.scalars.query_offsets, lane) - first)
    count = jnp.where(real, count, 0)
    lowest = jax.lax.fori_loop(
        0,
        count,
        lambda i, low: jnp.minimum(low, call.scalars.first_visible[start + i]),
        jnp.int32(_NEVER),
    )
    context = call.scalars.context_lengths[bounded]
    some = real & (lowest < context)
    begin = jnp.where(some, lowest // call.page_size, 0)
    end = jnp.where(some, pl.cdiv(context, call.page_size), 0)
    return Tile(lane=lane, first=first, count=count, lowest=lowest, begin=begin, end=end)


def key_tiles(call: Call, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Which tiles of its lane's in-flight keys it may see."""
    lane = jnp.minimum(tile.lane, call.lanes - 1)
    keys = lane_length(call, call.scalars.key_offsets, lane)
    ahead = keys - lane_length(call, call.scalars.query_offsets, lane)
    causal = call.scalars.causal[lane] != 0
    hidden = jnp.maximum(tile.lowest - call.scalars.context_lengths[lane], 0)
    begin = jnp.where(causal, hidden, 0) // call.tiling.keys
    seen = jnp.where(causal, jnp.clip(tile.first + tile.count + ahead, 0, keys), keys)
    return begin, jnp.where(tile.count > 0, pl.cdiv(seen, call.tiling.keys), 0)
