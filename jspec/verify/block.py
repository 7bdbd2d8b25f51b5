"""Block verification: the draft tokens are accepted jointly, never fewer on average than one by one.

Source: Sun et al., arXiv 2403.10444, algorithm 2. At a cut the block is everything that can be tested,
the first unverified token included, and the outcome is cut to what has rows: a prefix of a sample of the
target is one. Like there, the block may end wherever tokens before its end say so.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.coins import Coins
from jspec.round import Proposal
from jspec.target_rows import TargetRows
from jspec.verify.greedy import node_numbers
from jspec.verify.proposed import remainder, token_probs
from jspec.verify.rejection import end_run, tested_lengths


def verify_block(
    proposal: Proposal, rows: TargetRows, verify_lengths: Int[Array, "lanes"], coins: Coins
) -> tuple[Int[Array, "lanes"], Int[Array, "lanes"]]:
    """Accepts the longest prefix of a chain whose coin allows it; arguments and result as `rejection.reject`.

    h_i = min(h_{i-1} p_i / q_i, 1) is the probability that at least i tokens are accepted, given the
    first i. The longest i whose own coin is below a_i is taken: a_i = h_i at the end of the block, and
    r / (r + 1 - h_i) before it, r the mass of max(h_i p - q, 0) after token i. A run that ends at i draws
    from that residual.
    """
    lanes, drafts = proposal.tokens.shape
    if drafts == 0:
        nothing = jnp.zeros((lanes,), jnp.int32)
        return end_run(proposal, rows, verify_lengths, nothing, jnp.ones((lanes,), jnp.float32), coins.bonus)
    tested = tested_lengths(proposal, verify_lengths)
    draft = node_numbers(lanes, drafts)
    p = jnp.exp(rows.log_prob(draft, proposal.tokens))
    q = token_probs(proposal)
    ratios = jnp.where((draft < tested[:, None]) & (q > 0) & (p > 0), p / jnp.where(q > 0, q, 1), 0)

    def step(carry: tuple[Array, Array, Array], item: tuple[Array, Array, Array]):
        reach, run, scale = carry
        length, ratio, coin = item  # `length` tokens accepted, the last of them with this ratio and coin
        reach = jnp.minimum(reach * ratio, 1)
        probs = jnp.exp(rows.row(jnp.broadcast_to(length, (lanes,))))
        left = jnp.sum(
            remainder(proposal, jnp.broadcast_to(length, (lanes,)), reach[:, None] * probs), axis=1
        )
        inside = (length < tested) & (reach < 1)
        chance = jnp.where(inside, left / jnp.where(inside, left + 1 - reach, 1), reach)
        accepted = (reach > 0) & (coin < chance)
        return (reach, jnp.where(accepted, length, run), jnp.where(accepted, reach, scale)), None

    one = jnp.ones((lanes,), jnp.float32)
    lengths = jnp.arange(1, drafts + 1, dtype=jnp.int32)
    (_, run, scale), _ = jax.lax.scan(
        step, (one, jnp.zeros((lanes,), jnp.int32), one), (lengths, ratios.T, coins.accept.T)
    )
    return end_run(proposal, rows, verify_lengths, run, scale, coins.bonus)
