"""Greedy verification: follow the target's own choices through the proposal."""

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.round import Proposal
from jspec.target_rows import TargetRows


def greedy_choices(rows: TargetRows, nodes: int) -> Int[Array, "lanes nodes"]:
    """The target's best id after each of the first `nodes` nodes of every lane."""
    return rows.argmax(node_numbers(rows.starts.shape[0], nodes))


def node_numbers(lanes: int, nodes: int) -> Int[Array, "lanes nodes"]:
    """0, 1, 2, ... for every lane."""
    return jnp.broadcast_to(jnp.arange(nodes, dtype=jnp.int32), (lanes, nodes))


def follow(
    proposal: Proposal, choices: Int[Array, "lanes nodes"], verify_lengths: Int[Array, "lanes"]
) -> tuple[Int[Array, "lanes"], Int[Array, "lanes"]]:
    """Walks down a chain for as long as its tokens are the ones chosen.

    Placeholders and unverified tokens are not walked to, whatever they hold, and a choice of -1 (a row
    that is no distribution) equals no token.

    Args:
      proposal: a chain.
      choices: the token to emit after each node.
      verify_lengths: nodes past these have no row.

    Returns:
      accept_length, and the choice at the node where the walk ends.
    """
    lanes, drafts = proposal.tokens.shape
    draft = node_numbers(lanes, drafts)
    verified = jnp.minimum(verify_lengths, proposal.lengths)[:, None]
    taken = (draft < verified) & (proposal.tokens == choices[:, :drafts]) & (proposal.tokens >= 0)
    accept_length = jnp.sum(jnp.cumprod(taken.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return accept_length, jnp.take_along_axis(choices, accept_length[:, None], axis=1)[:, 0]
