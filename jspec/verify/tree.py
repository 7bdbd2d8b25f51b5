"""Verification of trees: greedy and coupled follow the target's choice, sampled ones its distribution."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, UInt32

from jspec.coins import Coins, coupled_noise
from jspec.round import OneHot, Proposal, Verdict
from jspec.target_rows import TargetRows
from jspec.verify.walk import eligible_drafts, walk
from jspec.vocabulary import draw
from pallas_kernels.vocabulary_row.choices import argmax


def follow_tree(
    proposal: Proposal,
    rows: TargetRows,
    verify_lengths: Int[Array, "lanes"],
    coupled: Bool[Array, "lanes"],
    seeds: UInt32[Array, "lanes"],
    text_lengths: Int[Array, "lanes"],
) -> Verdict:
    """Walks to the draft token that is the target's choice at its parent, for as long as there is one.

    The choice is the best id, with the request's noise for its position on coupled lanes (see
    `jspec.verify.coupled`). Only rows that the walk comes to are looked at: one per level, not per node.

    Args:
      proposal: a tree.
      rows: greedy and sampled ones; the outcome of sampled lanes that are not coupled means nothing.
      verify_lengths: draft tokens of each lane that have a row. One without can still be the bonus.
      coupled: lanes whose choice is drawn by their seed.
      seeds: of the lanes' requests.
      text_lengths: tokens known per lane, the anchor included.

    Returns:
      The verdict; its bonus is the choice at the node where the walk ends, -1 where that row is no
      distribution.
    """

    def choice(node: Array, depth: Array) -> Array:
        kept = rows.kept(node)

        def noisy() -> Array:
            noise = coupled_noise(seeds, text_lengths + depth, kept.shape[1])
            return argmax(jnp.where(coupled[:, None], kept + noise, kept))

        return jax.lax.cond(jnp.any(coupled), noisy, lambda: argmax(kept))

    def step(node: Array, depth: Array, children: Array) -> Array:
        return children & (proposal.tokens == choice(node, depth)[:, None])

    path, accept_length, end = walk(proposal, verify_lengths, step)
    return Verdict(path=path, accept_length=accept_length, bonus=choice(end, accept_length))


def sample_tree(
    proposal: Proposal, rows: TargetRows, verify_lengths: Int[Array, "lanes"], coins: Coins
) -> Verdict:
    """Draws from the target at each node, and walks on while the draw is a child.

    One coin per node: the first child whose mass, with that of the siblings before it, exceeds the coin is
    taken. So a child is taken with its own probability, and past all of them the token is drawn from what
    the target leaves to others. Which tokens hang on a node is fixed before any coin is tossed, so what is
    emitted follows the target. A draft token without a row takes no part, and may be the bonus like any
    other token; which of them have rows must not depend on coins of this round either.

    Args:
      proposal: a tree, its q one-hot.
      rows: sampled rows; the outcome of other lanes means nothing.
      verify_lengths: draft tokens of each lane that have a row after them.
      coins: from `draw_coins`; accept[j] decides among the children of node j.

    Returns:
      The verdict; a bonus of -1 where the row that decides it is not a distribution.

    Raises:
      ValueError: q is not one-hot.

    Source: SGLang 0.5.23, speculative/sampling.cuh (target-only tree sampling with both thresholds 1).
      Difference: of siblings with the same token only the first has mass.
    """
    if not isinstance(proposal.q, OneHot):
        raise ValueError(
            f"proposal.q: expected OneHot for a tree, got {type(proposal.q).__name__}; draw chains only, or take "
            "a node's children without a draw"
        )
    lanes, drafts = proposal.tokens.shape
    assert proposal.parents is not None
    at_parent = jnp.clip(proposal.parents, 0, drafts)
    mass = jnp.exp(rows.log_prob(at_parent, proposal.tokens))

    def step(node: Array, depth: Array, children: Array) -> Array:
        coin = jnp.take_along_axis(coins.accept, jnp.minimum(node, drafts - 1)[:, None], axis=1)
        past = jnp.cumsum(jnp.where(children, mass, 0), axis=1) > coin
        passing = children & past & (mass > 0)
        return passing & (jnp.cumsum(passing, axis=1) == 1)

    path, accept_length, end = walk(proposal, verify_lengths, step)
    probs = jnp.exp(rows.row(end))
    refused = eligible_drafts(proposal, verify_lengths) & (proposal.parents == end[:, None])
    lane = jax.lax.broadcasted_iota(jnp.int32, (lanes, drafts), 0)
    ids = jnp.where(refused, proposal.tokens, probs.shape[1])
    # A factor instead of a zero, so that NaN stays.
    left = probs.at[lane, ids].multiply(0, mode="drop")
    left = jnp.where(jnp.any(left > 0, axis=1, keepdims=True), left, probs)
    return Verdict(path=path, accept_length=accept_length, bonus=draw(left, coins.bonus))
