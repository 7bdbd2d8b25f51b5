"""Rejection sampling: a draft token drawn from q is accepted with probability min(1, p/q).

A refused token is replaced by a draw from max(p - q, 0), so that what is emitted follows p whatever q is.

Source: Leviathan et al., arXiv 2211.17192, algorithm 1; Chen et al., arXiv 2302.01318. Differences: the
test is u * q < p, strict, so that a token without target mass is never accepted, and an empty residual
draws from p.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.coins import Coins
from jspec.round import Proposal
from jspec.target_rows import TargetRows
from jspec.verify.greedy import node_numbers
from jspec.verify.proposed import remainder, token_probs
from jspec.vocabulary import draw


def reject(
    proposal: Proposal, rows: TargetRows, verify_lengths: Int[Array, "lanes"], coins: Coins
) -> tuple[Int[Array, "lanes"], Int[Array, "lanes"]]:
    """Tests the draft tokens of a chain one after the other.

    Args:
      proposal: a chain.
      rows: sampled rows; the outcome of other lanes means nothing.
      verify_lengths: draft tokens of each lane that have a row after them.
      coins: from `draw_coins`.

    Returns:
      accept_length and bonus; a bonus of -1 where the row that decides it is not a distribution.
    """
    lanes, drafts = proposal.tokens.shape
    draft = node_numbers(lanes, drafts)
    p = jnp.exp(rows.log_prob(draft, proposal.tokens))
    q = token_probs(proposal)
    passed = (draft < tested_lengths(proposal, verify_lengths)[:, None]) & (q > 0) & (coins.accept * q < p)
    run = jnp.sum(jnp.cumprod(passed.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)
    return end_run(proposal, rows, verify_lengths, run, jnp.ones((lanes,), jnp.float32), coins.bonus)


def tested_lengths(proposal: Proposal, verify_lengths: Int[Array, "lanes"]) -> Int[Array, "lanes"]:
    """Draft tokens that can be tested: a token's test needs the row before it, not the one after it.

    So at a cut the first unverified token is tested, too, at the last verified row. Whether it passes or
    not, it becomes the bonus or is replaced by it: the outcome is as much a draw from p as a fresh one.
    """
    return jnp.minimum(proposal.lengths, verify_lengths + 1)


def end_run(
    proposal: Proposal,
    rows: TargetRows,
    verify_lengths: Int[Array, "lanes"],
    run: Int[Array, "lanes"],
    scale: Float[Array, "lanes"],
    coins: Float[Array, "lanes"],
) -> tuple[Int[Array, "lanes"], Int[Array, "lanes"]]:
    """Turns a run of draft tokens that passed into accept_length and bonus.

    Args:
      proposal: as in `reject`.
      rows: as in `reject`.
      verify_lengths: as in `reject`.
      run: tokens that passed, at most `tested_lengths`.
      scale: of p in the residual, 1 but for block verification.
      coins: for the final draw.
    """
    drafts = proposal.tokens.shape[1]
    verified = jnp.minimum(verify_lengths, proposal.lengths)
    accept_length = jnp.minimum(run, verified)
    probs = jnp.exp(rows.row(accept_length))
    if drafts == 0:
        return accept_length, draw(probs, coins)
    refused = run < tested_lengths(proposal, verify_lengths)
    residual = remainder(proposal, run, scale[:, None] * probs)
    from_residual = refused & jnp.any(residual > 0, axis=1)
    drawn = draw(jnp.where(from_residual[:, None], residual, probs), coins)
    beyond = jnp.take_along_axis(proposal.tokens, jnp.minimum(verified, drafts - 1)[:, None], axis=1)[:, 0]
    return accept_length, jnp.where(run > verified, beyond, drawn)
