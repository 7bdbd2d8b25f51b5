"""From a drafter's confidence to the probability that a draft token is emitted."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def usable(confidence: Float[Array, "*shape"]) -> Bool[Array, "*shape"]:
    """Whether each confidence is a probability. A sigmoid in float32 reaches 0 and 1, so both count."""
    return (confidence >= 0) & (confidence <= 1)


def survival(
    confidence: Float[Array, "lanes drafts"], parents: Int[Array, "lanes drafts"] | None = None
) -> Float[Array, "lanes drafts"]:
    """P(draft token and everything before it on its path accepted).

    A confidence that is no probability is read as 1, at its own position alone: what lies before it
    must not depend on it, or the choice of what to verify would look at tokens that it decides about.

    Args:
      confidence: P(accepted given that the path before it was).
      parents: node number of each draft token's parent, below its own; None = a chain.

    Source: DSpark (arXiv 2607.05147), section 3.2; a tree multiplies along each path.
    """
    confidence = jnp.where(usable(confidence), confidence, 1)
    if parents is None:
        return jnp.cumprod(confidence, axis=1)
    lanes, drafts = confidence.shape
    lane = jnp.arange(lanes, dtype=jnp.int32)

    def node(index: Array, found: Array) -> Array:
        product = found[lane, parents[:, index]] * confidence[:, index]
        return found.at[:, index + 1].set(product)

    of_nodes = jax.lax.fori_loop(0, drafts, node, jnp.ones((lanes, drafts + 1), confidence.dtype))
    return of_nodes[:, 1:]
