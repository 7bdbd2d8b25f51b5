"""The pairs that an EAGLE drafter absorbs: (feature of token t, token t + 1), at index and position t."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.protocol import Committed, Text
from jspec.packing import owner
from jspec.slots import rows_of
from pallas_kernels.pytree import pytree, static


@pytree
class Pairs:
    """What a round committed, lanes packed one after the other, in the order of the text.

    The last pair of a lane holds its new anchor. Rows past offsets[-1] are padding: zeros.
    """

    features: Float[Array, "rows features"]
    next_tokens: Int[Array, "rows"]
    positions: Int[Array, "rows"]
    offsets: Int[Array, "bounds"]
    path: Int[Array, "lanes commits"]  # row of the lane's i-th pair, -1 = none
    max_pairs: int = static()  # no lane has more


def committed_pairs(committed: Committed, lanes: Int[Array, "lanes"], text: Text) -> Pairs:
    """Packs the committed nodes of a round, which lie anywhere among its nodes.

    A lane may have as many as the whole round, but all lanes together have no more: so packed rows are
    as few as the round's nodes, where a row per lane and commit would be a multiple of them.

    Args:
      committed: of the round. Features of nodes that were rejected may hold anything.
      lanes: slot of each lane, -1 for padding.
      text: with what the round emitted, so that the token after every committed one is known.
    """
    num_nodes, commits = committed.positions.shape[0], committed.path.shape[1]
    counts = jnp.sum(committed.path >= 0, axis=1, dtype=jnp.int32)
    offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    row = jnp.arange(num_nodes, dtype=jnp.int32)
    real = row < offsets[-1]
    lane = owner(row, offsets)
    within = jnp.clip(row - offsets[lane], 0, commits - 1)
    node = jnp.maximum(committed.path[lane, within], 0)
    positions = jnp.where(real, committed.context_lengths[lane] + within, 0)
    following = jnp.minimum(positions + 1, text.tokens.shape[1] - 1)
    index = jax.lax.broadcasted_iota(jnp.int32, committed.path.shape, 1)
    return Pairs(
        features=jnp.where(real[:, None], committed.features[node], 0),
        next_tokens=jnp.where(real, text.tokens[rows_of(lanes)[lane], following], 0),
        positions=positions,
        offsets=offsets,
        path=jnp.where(index < counts[:, None], offsets[:-1, None] + index, -1),
        max_pairs=min(commits, num_nodes),
    )
