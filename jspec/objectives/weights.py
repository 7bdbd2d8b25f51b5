"""How much each row of a block counts: by its position, or by how likely the rows before it survive."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

Weighting = Literal["position", "dpace", "dpace_cumulative", "dpace_continuation"]
WEIGHTINGS: tuple[str, ...] = get_args(Weighting)


def dpace_weights(
    label_probs: Float[Array, "blocks block"],
    mask: Bool[Array, "blocks block"],
    *,
    alpha: float,
    form: Weighting,
) -> Float[Array, "blocks block"]:
    """D-PACE: rows weighted by the acceptance that the drafter's own probabilities predict.

    s_j = (1 - alpha) * P(label j) + alpha, 1 where nothing is supervised; P_j = s_1 ... s_j.
    "dpace_cumulative" is P_j; "dpace" the sum of P_k over supervised k >= j, how many tokens row j
    still decides about; "dpace_continuation" that sum divided by P_j. No gradient flows through them.

    Args:
      label_probs: the drafter's probability of each label.
      mask: supervised rows.
      alpha: smoothing, in [0, 1].
      form: which of the three.

    Source: SpecForge a6b6b023, `core/loss.py` (dpace).
    """
    probs = jax.lax.stop_gradient(label_probs)
    survival = jnp.cumprod(jnp.where(mask, (1 - alpha) * probs + alpha, 1.0), axis=1)
    if form == "dpace_cumulative":
        return survival * mask
    ahead = jnp.cumsum((survival * mask)[:, ::-1], axis=1)[:, ::-1]
    return (ahead if form == "dpace" else ahead / survival) * mask
