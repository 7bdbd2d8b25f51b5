"""Several continuations of a text as one tree, in which equal beginnings are shared."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.round import OneHot, Proposal


def trie(
    tokens: Int[Array, "lanes continuations drafts"], lengths: Int[Array, "lanes continuations"]
) -> Proposal:
    """The tree of each lane's continuations, the first one whole, then what the next ones add.

    So a cut takes from the worst of them first. Example: "a b", "a c" and "d" give the draft tokens
    a, b, c, d with parents 0, 1, 1, 0.

    Args:
      tokens: continuations, best first.
      lengths: of each one; 0 leaves it out.
    """
    lanes, count, depth = tokens.shape
    within = jnp.arange(depth, dtype=jnp.int32)[None, None, :] < lengths[:, :, None]
    owner = _first_with_beginning(tokens, within)
    own = within & (owner == jnp.arange(count, dtype=jnp.int32)[None, :, None])
    flat = own.reshape(lanes, -1)
    node = jnp.cumsum(flat, axis=1, dtype=jnp.int32)  # of what is kept; the anchor is 0
    place = owner * depth + jnp.arange(depth, dtype=jnp.int32)[None, None, :]
    above = jnp.take_along_axis(node, place.reshape(lanes, -1), axis=1).reshape(place.shape)[:, :, :-1]
    parents = jnp.concatenate([jnp.zeros((lanes, count, 1), jnp.int32), above], axis=2)
    order = jnp.argsort(~flat, axis=1, stable=True)
    return Proposal(
        tokens=jnp.take_along_axis(tokens.reshape(lanes, -1), order, axis=1),
        lengths=node[:, -1],
        q=OneHot(),
        parents=jnp.take_along_axis(parents.reshape(lanes, -1), order, axis=1),
        tree_depth=depth,
    )


def _first_with_beginning(
    tokens: Int[Array, "lanes continuations drafts"], within: Bool[Array, "lanes continuations drafts"]
) -> Int[Array, "lanes continuations drafts"]:
    """For every place of a continuation, the first one that has the same tokens up to there."""
    same = (tokens[:, :, None] == tokens[:, None]) & within[:, :, None] & within[:, None]
    return jnp.argmax(jnp.cumprod(same, axis=3), axis=2).astype(jnp.int32)
