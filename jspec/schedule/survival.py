"""From a drafter's confidence to the probability that a draft token is emitted."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.ancestry import depths
from jspec.round import Proposal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """Calibrated confidence = sigmoid(logit / temperature + offset), by depth of the draft token.

    Raises:
      ValueError: no temperature, one that is not positive, or another number of offsets.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]

    def __post_init__(self) -> None:
        positive = all(math.isfinite(t) and t > 0 for t in self.temperatures)
        if not self.temperatures or not positive:
            raise ValueError(
                f"temperatures: expected positive numbers, one per draft token, got {list(self.temperatures)}; "
                "calibrate again"
            )
        if len(self.offsets) != len(self.temperatures) or not all(map(math.isfinite, self.offsets)):
            raise ValueError(
                f"offsets: expected {len(self.temperatures)} finite numbers, one per temperature, got "
                f"{list(self.offsets)}; calibrate again"
            )


def usable(confidence: Float[Array, "lanes drafts"]) -> Bool[Array, "lanes drafts"]:
    """Whether each confidence is a probability. A sigmoid in float32 reaches 0 and 1, so both count."""
    return (confidence >= 0) & (confidence <= 1)


def survival_of(proposal: Proposal, curve: Curve | None = None) -> Float[Array, "lanes drafts"]:
    """P(draft token and everything before it on its path accepted), from the proposal's confidence.

    Products are taken from the anchor on, one factor after the other, so that every machine gets the same
    floats: ties decide what is verified.

    A confidence that is no probability is read as 1, at its own position alone: what lies before it
    must not depend on it, or the choice of what to verify would look at tokens that it decides about.

    Args:
      proposal: a chain or a tree; without confidence all ones.
      curve: calibration of the confidence; None = as it is.

    Source: DSpark (arXiv 2607.05147), section 3.2; a tree multiplies along each path.
    """
    if proposal.confidence is None:
        return jnp.ones(proposal.tokens.shape, jnp.float32)
    confidence = proposal.confidence.astype(jnp.float32)
    confidence = jnp.where(usable(confidence), confidence, 1)
    if curve is not None:
        confidence = calibrated(confidence, proposal.parents, curve)
    lanes, drafts = confidence.shape
    if proposal.parents is None:
        product, products = jnp.ones((lanes,), jnp.float32), []
        for i in range(drafts):
            product = product * confidence[:, i]
            products.append(product)
        return jnp.stack(products, axis=1) if drafts else confidence
    parents = jnp.clip(proposal.parents, 0, drafts)

    def extend(i: jax.Array, products: jax.Array) -> jax.Array:
        before = jnp.take_along_axis(products, parents[:, i, None], axis=1)[:, 0]
        return products.at[:, i + 1].set(before * confidence[:, i])

    return jax.lax.fori_loop(0, drafts, extend, jnp.ones((lanes, drafts + 1), jnp.float32))[:, 1:]


def calibrated(
    confidence: Float[Array, "lanes drafts"], parents: Int[Array, "lanes drafts"] | None, curve: Curve
) -> Float[Array, "lanes drafts"]:
    """Confidence by the curve, which has an entry for every depth.

    Args:
      confidence: in [0, 1]; 0 and 1 stay what they are.
      parents: of a tree; None = chains.
      curve: from a calibration.
    """
    logits = jnp.log(confidence) - jnp.log1p(-confidence)
    deepest = len(curve.temperatures) - 1
    temperatures, offsets = (jnp.asarray(v, jnp.float32) for v in (curve.temperatures, curve.offsets))
    if parents is None:
        depth = jnp.broadcast_to(jnp.arange(confidence.shape[1], dtype=jnp.int32), confidence.shape)
    else:
        depth = jnp.clip(depths(parents)[:, 1:] - 1, 0, deepest)
    return jax.nn.sigmoid(logits / temperatures[depth] + offsets[depth])
