"""Choices over rows of the vocabulary on a mesh or without one: the best ids, a draw.

Where the mesh in use splits the vocabulary, every device looks at its own part, and what they exchange has
the size of the answer. A vocabulary that the devices do not divide is whole on each of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jspec.sharding import MESH_AXES, on_every_device, parts_of
from pallas_kernels.vocabulary_row import choices

TopK = Callable[[Array, int], tuple[Array, Array] | list[Array]]


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
    """See `pallas_kernels.vocabulary_row.choices.draw`.

    Devices that share the row sum their parts first, so that a coin next to an edge may fall to the other side
    of it than on one device.
    """
    size = weights.shape[1] // parts_of("vocabulary", weights.shape[1])
    if size == weights.shape[1]:
        return choices.draw(weights, coins)
    axis = MESH_AXES["vocabulary"]

    def run(weights: Array, coins: Array) -> Array:
        blocks = choices.in_blocks(weights)
        masses = jax.lax.all_gather(jnp.sum(blocks, axis=(1, 2)), axis, axis=1)
        ends = jnp.cumsum(masses, axis=1)
        goal = coins * ends[:, -1]
        part, mine = choices.first_past(masses, ends, goal), jax.lax.axis_index(axis)
        before = jnp.where(mine > 0, ends[:, jnp.maximum(mine - 1, 0)], 0)
        found = jnp.where(part == mine, mine * size + choices.find(blocks, goal - before), 0)
        return jnp.where(choices.is_mass(ends[:, -1]), jax.lax.psum(found, axis), -1)

    whole = PartitionSpec()
    run = on_every_device(run, in_specs=(PartitionSpec(None, axis), whole), out_specs=whole)
    return run(weights, coins)
