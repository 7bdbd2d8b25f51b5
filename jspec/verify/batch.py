"""Verifies a mixed batch: every lane by the rule that its request asks for."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.coins import Coins
from jspec.round import Proposal, Verdict, chain_path
from jspec.sampling import SamplingTable
from jspec.slots import rows_of
from jspec.target_rows import TargetRows
from jspec.verify.block import verify_block
from jspec.verify.coupled import coupled_choices
from jspec.verify.greedy import follow, greedy_choices
from jspec.verify.rejection import reject
from jspec.verify.tree import follow_tree, sample_tree


def verify(
    proposal: Proposal,
    rows: TargetRows,
    verify_lengths: Int[Array, "lanes"],
    coins: Coins,
    table: SamplingTable,
    lanes: Int[Array, "lanes"],
    text_lengths: Int[Array, "lanes"],
    *,
    block_verification: bool = False,
) -> Verdict:
    """Decides which draft tokens of each lane are accepted, and the token after them.

    A lane is greedy at temperature 0, coupled if its request set a seed, else sampled: a chain by p/q, a tree
    by drawing from the target at each node. Rules that no lane needs are skipped.

    Args:
      proposal: entries at or past its lengths are placeholders and are never accepted.
      rows: the target's distribution after every verified node.
      verify_lengths: draft tokens of each lane that the target executed. If that is fewer than proposed and
        all of them are accepted, a sampled lane of a chain tests the next one for the bonus.
      coins: from `draw_coins`.
      table: settings per slot.
      lanes: slot of each lane, -1 for padding, whose verdict means nothing.
      text_lengths: tokens known per lane, the anchor included.
      block_verification: static; sampled lanes accept jointly instead of one by one. Chains only.

    Returns:
      The verdict. A bonus of -1 says that a row the lane depends on is not a distribution (NaN, or nothing
      allowed): that request has to fail. Other lanes do not notice.

    Raises:
      ValueError: block verification of a tree, or a tree whose q is not one-hot.
    """
    if block_verification and proposal.parents is not None:
        raise ValueError("block_verification: expected False for a tree, got True; it is defined on chains")
    nodes = proposal.tokens.shape[1] + 1
    slots = rows_of(lanes)
    sampled = (lanes >= 0) & (table.temperature[slots] > 0)
    coupled = sampled & table.seeded[slots]
    tossed = sampled & ~table.seeded[slots]

    is_tree = proposal.parents is not None

    def along_chain(accept_length: Array, bonus: Array) -> Verdict:
        return Verdict(path=chain_path(accept_length, nodes), accept_length=accept_length, bonus=bonus)

    if is_tree:
        followed = follow_tree(proposal, rows, verify_lengths, coupled, table.seeds[slots], text_lengths)
    else:
        choices = greedy_choices(rows, nodes)
        choices = jax.lax.cond(
            jnp.any(coupled),
            lambda: jnp.where(
                coupled[:, None], coupled_choices(rows, table.seeds[slots], text_lengths, nodes), choices
            ),
            lambda: choices,
        )
        followed = along_chain(*follow(proposal, choices, verify_lengths))

    def toss() -> Verdict:
        if is_tree:
            outcome = sample_tree(proposal, rows, verify_lengths, coins)
        else:
            rule = verify_block if block_verification else reject
            outcome = along_chain(*rule(proposal, rows, verify_lengths, coins))
        return Verdict(
            path=jnp.where(tossed[:, None], outcome.path, followed.path),
            accept_length=jnp.where(tossed, outcome.accept_length, followed.accept_length),
            bonus=jnp.where(tossed, outcome.bonus, followed.bonus),
        )

    return jax.lax.cond(jnp.any(tossed), toss, lambda: followed)
