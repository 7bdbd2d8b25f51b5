"""Walking down a tree of draft tokens, from the anchor, one level at a time, all lanes at once.

Only verified draft tokens are walked to. Of siblings with the same token the first is the one that
counts: the others are placeholders.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.round import Proposal

# Which draft token each lane goes to, given its node, the depth of that, and the draft tokens that hang on
# it; none set = the walk ends there.
Step = Callable[
    [Int[Array, "lanes"], Int[Array, ""], Bool[Array, "lanes drafts"]], Bool[Array, "lanes drafts"]
]


def walk(
    proposal: Proposal, verify_lengths: Int[Array, "lanes"], step: Step
) -> tuple[Int[Array, "lanes path"], Int[Array, "lanes"], Int[Array, "lanes"]]:
    """Follows `step` from the anchor for as long as it names a draft token.

    Args:
      proposal: a tree.
      verify_lengths: draft tokens of each lane that have a row.
      step: says where to go: to one of the draft tokens at most.

    Returns:
      The path (anchor first, -1 behind its end), its number of draft tokens, the node where it ends.
    """
    lanes, drafts = proposal.tokens.shape
    assert proposal.parents is not None
    parents, eligible = proposal.parents, eligible_drafts(proposal, verify_lengths)
    index = jax.lax.broadcasted_iota(jnp.int32, (lanes, drafts), 1)

    def descend(carry: tuple[Array, Array], depth: Array) -> tuple[tuple[Array, Array], Array]:
        node, walking = carry
        chosen = step(node, depth, eligible & (parents == node[:, None]))
        child = jnp.max(jnp.where(chosen, index, -1), axis=1) + 1
        walking = walking & (child > 0)
        node = jnp.where(walking, child, node)
        return (node, walking), jnp.where(walking, node, -1)

    start = jnp.zeros((lanes,), jnp.int32)
    levels = jnp.arange(proposal.depth, dtype=jnp.int32)
    (end, _), below = jax.lax.scan(descend, (start, jnp.ones((lanes,), bool)), levels)
    path = jnp.concatenate([start[:, None], below.T], axis=1)
    return path, jnp.sum(below >= 0, axis=0, dtype=jnp.int32), end


def eligible_drafts(proposal: Proposal, verify_lengths: Int[Array, "lanes"]) -> Bool[Array, "lanes drafts"]:
    """Draft tokens that may be accepted: verified, an id, and the first of its siblings with this id."""
    lanes, drafts = proposal.tokens.shape
    tokens, parents = proposal.tokens, proposal.parents
    assert parents is not None
    index = jax.lax.broadcasted_iota(jnp.int32, (lanes, drafts), 1)
    same = (tokens[:, :, None] == tokens[:, None, :]) & (parents[:, :, None] == parents[:, None, :])
    repeated = jnp.any(same & (index[:, None, :] < index[:, :, None]), axis=2)
    verified = index < jnp.minimum(verify_lengths, proposal.lengths)[:, None]
    return verified & (tokens >= 0) & ~repeated
