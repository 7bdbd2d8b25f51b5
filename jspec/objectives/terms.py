"""Losses as sums that can be added over chunks, micro-batches and devices, and their exact mean."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.pytree import pytree

S = TypeVar("S")
T = TypeVar("T")


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


def summed_over_chunks(terms_of: Callable[[T], S], items: T, *, chunk: int) -> S:
    """Sums `terms_of(chunk of items)` with one chunk's intermediate values in memory at a time.

    Each chunk is computed again in the backward pass instead of being kept.

    Args:
      terms_of: from a slice of `items` to a pytree of sums; it must give zeros for items that are all
        zero, because the last chunk is filled up with them.
      items: a pytree of arrays with one leading axis in common.
      chunk: items at a time.
    """
    count = jax.tree.leaves(items)[0].shape[0]
    chunk = min(chunk, count)
    pieces = -(-count // chunk)

    def split(array: Array) -> Array:
        filler = [(0, pieces * chunk - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, filler).reshape(pieces, chunk, *array.shape[1:])

    split_items = jax.tree.map(split, items)
    first = jax.eval_shape(terms_of, jax.tree.map(lambda a: a[0], split_items))
    start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), first)

    def step(total: S, piece: T) -> tuple[S, None]:
        return jax.tree.map(jnp.add, total, jax.checkpoint(terms_of)(piece)), None

    return jax.lax.scan(step, start, split_items)[0]
