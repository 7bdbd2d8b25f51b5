"""What q said: of the draft tokens, and over the vocabulary at one node.

A q that is no probability (not finite, negative, above 1) counts as 0, so its token is refused.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.round import Dense, OneHot, Proposal, Sparse


def checked(probs: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Probabilities, with 0 for what is none."""
    return jnp.where((probs > 0) & (probs <= 1), probs, 0)


def token_probs(proposal: Proposal) -> Float[Array, "lanes drafts"]:
    """q of every draft token; 0 for a token that its row does not hold."""
    tokens, q = proposal.tokens, proposal.q
    match q:
        case OneHot():
            return jnp.ones(tokens.shape, jnp.float32)
        case Sparse(ids=ids, probs=probs):
            return jnp.sum(jnp.where(ids == tokens[:, :, None], checked(probs), 0), axis=2)
        case Dense(ids=ids, probs=probs) if ids is not None:
            own = tokens[:, :, None] == ids[None, None, :]
            return jnp.sum(jnp.where(own, checked(probs), 0), axis=2)
        case Dense(probs=probs):
            held = (tokens >= 0) & (tokens < probs.shape[2])
            columns = jnp.clip(tokens, 0, probs.shape[2] - 1)[:, :, None]
            return jnp.where(held, checked(jnp.take_along_axis(probs, columns, axis=2)[:, :, 0]), 0)


def remainder(
    proposal: Proposal, draft: Int[Array, "lanes"], probs: Float[Array, "lanes vocabulary"]
) -> Float[Array, "lanes vocabulary"]:
    """max(probs - q, 0) over the vocabulary, with the q of one draft token per lane.

    Args:
      proposal: of at least one draft token.
      draft: 0-based draft token whose q is taken; clipped into range.
      probs: what is left of the target's distribution, possibly scaled.
    """
    lanes, drafts = proposal.tokens.shape
    vocabulary = probs.shape[1]
    lane = jnp.arange(lanes, dtype=jnp.int32)
    draft = jnp.clip(draft, 0, drafts - 1)
    q = proposal.q
    match q:
        case OneHot():
            ids, mass = proposal.tokens[lane, draft][:, None], jnp.ones((lanes, 1), jnp.float32)
        case Sparse():
            ids, mass = q.ids[lane, draft], checked(q.probs[lane, draft])
        case Dense(ids=columns) if columns is not None:
            ids = jnp.broadcast_to(columns[None, :], (lanes, columns.shape[0]))
            mass = checked(q.probs[lane, draft])
        case Dense():
            if q.probs.shape[2] != vocabulary:
                raise ValueError(
                    f"proposal.q: expected probabilities of {vocabulary} ids, got {q.probs.shape[2]}; "
                    "say which ids they belong to in Dense.ids"
                )
            return jnp.maximum(probs - checked(q.probs[lane, draft]), 0)
    ids = jnp.where(ids >= 0, ids, vocabulary)
    return jnp.maximum(probs.at[lane[:, None], ids].add(-mass, mode="drop"), 0)
