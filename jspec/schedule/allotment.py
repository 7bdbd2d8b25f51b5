"""How much each lane verifies: the device's half of the schedule, decided on this round's confidence.

Why this keeps the law: whether draft token j is verified depends on its lane's tokens up to j alone,
and a token that just missed is tested all the same, as the bonus (see `jspec.verify.rejection`). So
no draft token is thrown away because of what it is, or of what would have followed it.
"""

import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jspec.sharding import on_every_device
from pallas_kernels.survival.api import allot as survival_allot

# Less than this is never worth a node.
LEAST_SURVIVAL = 1e-6


def allot(
    survival: Float[Array, "lanes drafts"],
    lengths: Int[Array, "lanes"],
    slots: Int[Array, "lanes"],
    budget: Int[Array, ""] | int,
    *,
    least: Int[Array, ""] | int = 0,
    most: Int[Array, ""] | int | None = None,
    epsilon: Float[Array, ""] | float = LEAST_SURVIVAL,
) -> Int[Array, "lanes"]:
    """Spreads the round's budget over the draft tokens most likely to be emitted.

    Ranks by survival, then by earlier position, then by lower slot. Every lane receives a prefix of its
    node order: a draft token never competes with one before it, because its survival counts for no more
    than theirs. In a tree whose nodes are ordered by falling survival that changes nothing.

    Worked row: survival (.9, .5, .2) and (.8, .7, .1), budget 4 -> .9, .8, .7, .5 -> lengths (2, 2).

    Args:
      survival: P(draft token and all before it on its path accepted).
      lengths: draft tokens that each lane has; the rest of its row is ignored.
      slots: of the lanes, for ties; -1 for padding.
      budget: draft tokens that may be verified over all lanes, besides `least` of each lane.
      least: draft tokens that every lane verifies in any case, if it has them.
      most: draft tokens that a lane verifies at most; None = all.
      epsilon: a draft token of less survival is not verified, whatever the budget.

    Returns:
      verify_lengths, 0 .. drafts.

    Source: DSpark (arXiv 2607.05147), section 3.2.2; SGLang 0.5.23 `schedule_verify_lens_topk`.
    """
    lanes, drafts = survival.shape
    if not drafts:
        return jnp.zeros((lanes,), jnp.int32)
    run = on_every_device(survival_allot, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    return run(survival, lengths, slots, budget, least, drafts if most is None else most, epsilon)
