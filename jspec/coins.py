"""Random numbers of decoding: one function makes them, verifiers and drafters are handed them.

A coin is a function of (request seed, committed length at the round's start, node, purpose). The
committed length rises every round, so no coin is ever used twice. A key of the position alone would
draw a position again and again until it commits; an old confidence that depends on that draw could
then choose the round that admits it, and the output would be biased.

Noise of `coupled_noise` is the one exception, and is keyed by position on purpose: the token at a
position is then a function of (seed, text before it), whoever proposes it and whenever.

Both are functions of the seed, not of the batch: a request's numbers do not change with its lane or
its neighbours.
"""

import enum

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from pallas_kernels.pytree import pytree


class Purpose(enum.IntEnum):
    """What a random number is for. Numbers of different purposes are independent."""

    ACCEPT = 0
    BONUS = 1
    DRAFT = 2
    COUPLED = 3


@pytree
class Coins:
    """What verification needs in a round, uniform in [0, 1)."""

    # Of what hangs on node j: in a chain draft token j, against p/q; in a tree all children of the node.
    accept: Float[Array, "lanes drafts"]
    bonus: Float[Array, "lanes"]  # of the draw after the last accepted token


def draw_coins(seeds: UInt32[Array, "lanes"], committed_lengths: Int[Array, "lanes"], drafts: int) -> Coins:
    """The verifier's coins of a round.

    Args:
      seeds: of the lanes' requests.
      committed_lengths: tokens in the cache before the round.
      drafts: static width of the proposal; a coin's value does not depend on it.
    """
    return Coins(
        accept=uniforms(seeds, committed_lengths, drafts, Purpose.ACCEPT),
        bonus=uniforms(seeds, committed_lengths, 1, Purpose.BONUS)[:, 0],
    )


def uniforms(
    seeds: UInt32[Array, "lanes"], committed_lengths: Int[Array, "lanes"], count: int, purpose: Purpose
) -> Float[Array, "lanes count"]:
    """Coins 0 .. count - 1 of each lane for a purpose, in [0, 1)."""
    return (_bits(seeds, committed_lengths, count, purpose) >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def coupled_noise(
    seeds: UInt32[Array, "rows"], positions: Int[Array, "rows"], vocab_size: int
) -> Float[Array, "rows vocabulary"]:
    """Gumbel noise g(seed, position, id): argmax(log p + g) is a draw from p.

    Verifier and drafter add the same noise to their own log-probabilities, so they agree far more
    often than independent draws would, and the target's choice needs no knowledge of the draft's.

    Args:
      seeds: of the rows' requests.
      positions: in the text (prompt included, 0-based) of the token that the row decides.
      vocab_size: of the target; a drafter with a reduced vocabulary picks the columns of its ids.

    Source: Daliri et al., arXiv 2408.07978, with Gumbel noise in place of exponential races.
    """
    bits = _bits(seeds, positions, vocab_size, Purpose.COUPLED)
    # Numbers keep their precision near 0, where the tokens that win come from.
    return gumbel(
        jnp.minimum((bits.astype(jnp.float32) + 0.5) * jnp.float32(2**-32), jnp.float32(1 - 2**-24))
    )


def gumbel(uniforms: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Gumbel noise of uniform numbers in (0, 1): the id with the greatest log p + noise is a draw from p."""
    return -jnp.log(-jnp.log1p(-uniforms))


def _bits(
    seeds: UInt32[Array, "rows"], counters: Int[Array, "rows"], count: int, purpose: Purpose
) -> UInt32[Array, "rows count"]:
    def row(seed: Array, counter: Array) -> Array:
        key = jax.random.wrap_key_data(jnp.stack([seed, jnp.uint32(purpose)]), impl="threefry2x32")
        return jax.random.bits(jax.random.fold_in(key, counter), (count,), jnp.uint32)

    return jax.vmap(row)(seeds, counters)
