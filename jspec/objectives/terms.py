"""Losses as sums that can be added over chunks, micro-batches and devices, and their exact mean."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pytree import pytree


@pytree
class Terms:
    """The parts of a loss. Everything is a sum: the loss of several batches is the ratio of the sums."""

    numerator: Float[Array, ""]
    denominator: Float[Array, ""]  # no gradient flows into it
    metrics: dict[str, tuple[Array, Array]]  # name -> (sum, count), of any shape

    def loss(self) -> Float[Array, ""]:
        """The weighted mean."""
        return self.numerator / self.denominator

    def means(self) -> dict[str, Array]:
        """Every metric's mean; NaN where nothing was counted."""
        return {name: total / count for name, (total, count) in self.metrics.items()}


def add(a: Terms, b: Terms) -> Terms:
    """The terms of both batches together."""
    return jax.tree.map(jnp.add, a, b)
