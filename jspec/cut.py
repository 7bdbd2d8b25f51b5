"""Where a block of emitted tokens ends: the one place that knows about stops."""

import enum

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.first import first_where


class Finish(enum.IntEnum):
    """Why a request ended; RUNNING while it has not."""

    RUNNING = 0
    STOP = 1  # a stop token, or one that ends the grammar; it is emitted, and is the last token
    LENGTH = 2  # max_tokens or the end of the context
    BROKEN = 3  # the target's logits were NaN, or no token was allowed; nothing of that round is emitted


def cut(
    block: Int[Array, "lanes block"],
    block_lengths: Int[Array, "lanes"],
    stop_ids: Int[Array, "lanes stops"],
    room: Int[Array, "lanes"],
    ending: Bool[Array, "lanes block"] | None = None,
) -> tuple[Int[Array, "lanes"], Int[Array, "lanes"]]:
    """Finds the first stop, end of the grammar or length limit in each lane's block, whichever comes first.

    Runs before anything changes, so that cache, drafter, counters, log-probabilities and text
    agree. A stop token that is also the last one allowed ends the request as STOP; a stop token
    past the limit does not count. Example: room 5, block [a, b, STOP, c, d, e] keeps 3, STOP.

    Args:
      block: tokens that the round would emit, in order.
      block_lengths: how many of them are real; 0 = the lane emits nothing this round.
      stop_ids: ids that end the request, padded with -1.
      room: tokens that the request may still emit, at least 1 on lanes that emit.
      ending: tokens behind which the request's grammar allows nothing; None = no request has one.

    Returns:
      Tokens kept per lane and a `Finish` code per lane.
    """
    width = block.shape[1]
    index = jnp.arange(width, dtype=jnp.int32)[None, :]
    stops = jnp.any(block[:, :, None] == stop_ids[:, None, :], axis=2) & (block >= 0)
    if ending is not None:
        stops = stops | ending
    limit = jnp.minimum(block_lengths, room)
    stop_at = first_where(stops & (index < limit[:, None]), width)
    stopped = stop_at < width
    kept = jnp.where(stopped, stop_at + 1, limit)
    full = (block_lengths > 0) & (kept >= room)
    finish = jnp.where(stopped, Finish.STOP, jnp.where(full, Finish.LENGTH, Finish.RUNNING))
    return kept.astype(jnp.int32), finish.astype(jnp.int32)
