"""A loss summed over the rows that have one, with the gradient made along the way.

The usual way, a scan under `jax.checkpoint`, computes every chunk twice, and touches all weights for chunks in which
nothing is supervised. Here the chunks that have something are computed once: the loss is a sum, so its gradient
is the sum of the chunks' gradients, whatever the loss is multiplied with later.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

S = TypeVar("S")
P = TypeVar("P")
W = TypeVar("W")


def summed_over_live_chunks(
    terms_of: Callable[[P, Any, W], tuple[Float[Array, ""], S]],
    theta: P,
    constants: Any,
    items: W,
    live: Bool[Array, "items"],
    *,
    chunk: int,
) -> tuple[Float[Array, ""], S]:
    """Sums terms_of(theta, constants, some items) over chunks of items, with one chunk in memory at a time.

    Args:
      terms_of: to (numerator, further sums); zeros for items that are all zero. It must not close over traced
        arrays that gradients flow to.
      theta: what gradients flow to. Arrays of integers in it are constants.
      constants: whatever else `terms_of` needs.
      items: a pytree of arrays with one leading axis in common; no gradient flows to them.
      live: items that add something. They come first, and chunks behind the last of them are not computed.
      chunk: items at a time.

    Returns:
      The numerator, which gradients flow through, and the further sums, which have none.
    """
    count = live.shape[0]
    chunk = min(chunk, count)
    number = -(-count // chunk)

    def split(array: Array) -> Array:
        filler = [(0, number * chunk - count)] + [(0, 0)] * (array.ndim - 1)
        return jnp.pad(array, filler).reshape(number, chunk, *array.shape[1:])

    pieces, used = jax.tree.map(split, items), -(-jnp.sum(live, dtype=jnp.int32) // chunk)
    leaves, tree = jax.tree.flatten(theta)
    floating = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def at(leaves: list[Array], constants: tuple[list[Array], Any], piece: W) -> tuple[Array, S]:
        given, kept = iter(leaves), iter(constants[0])
        both = [next(given) if kind else next(kept) for kind in floating]
        return terms_of(jax.tree.unflatten(tree, both), constants[1], piece)

    trained = [leaf for leaf, kind in zip(leaves, floating, strict=True) if kind]
    fixed = [leaf for leaf, kind in zip(leaves, floating, strict=True) if not kind], constants
    value, sums = _total(at, trained, fixed, pieces, used)
    return value, jax.lax.stop_gradient(sums)


def summed_over_live_places(
    terms_of: Callable[[P, Any, Array, Array], tuple[Float[Array, ""], S]],
    theta: P,
    constants: Any,
    live: Bool[Array, "rows places"],
    *,
    chunk: int,
) -> tuple[Float[Array, ""], S]:
    """`summed_over_live_chunks` of the places of every token row.

    Args:
      terms_of: from theta, constants, places int32 [rows, chunk] and whether each is live.
      theta: see there.
      constants: see there.
      live: places that add something, wherever they are.
      chunk: places of every token row at a time.
    """
    order = jnp.argsort(~live, axis=1, stable=True)
    # Chunks are taken of the first axis.
    places, alive = order.T, jnp.take_along_axis(live, order, axis=1).T

    def swapped(theta: P, constants: Any, items: tuple[Array, Array]) -> tuple[Float[Array, ""], S]:
        return terms_of(theta, constants, items[0].T, items[1].T)

    return summed_over_live_chunks(
        swapped, theta, constants, (places, alive), jnp.any(alive, axis=1), chunk=chunk
    )


def _total(at: Callable[..., Any], trained: list[Array], fixed: Any, pieces: Any, used: Array) -> Any:
    def looped(body: Callable[[Any], Any], pieces: Any, used: Array) -> Any:
        start = jax.eval_shape(body, jax.tree.map(lambda a: a[0], pieces))
        start = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), start)

        def add(index: Array, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, body(jax.tree.map(lambda a: a[index], pieces)))

        return jax.lax.fori_loop(0, used, add, start)

    @jax.custom_vjp
    def total(trained: list[Array], fixed: Any, pieces: Any, used: Array) -> Any:
        return looped(lambda piece: at(trained, fixed, piece), pieces, used)

    def forward(trained: list[Array], fixed: Any, pieces: Any, used: Array) -> Any:
        def body(piece: Any) -> Any:
            out, grads = jax.value_and_grad(at, has_aux=True)(trained, fixed, piece)
            return out, [grad.astype(jnp.float32) for grad in grads]

        out, grads = looped(body, pieces, used)
        # Cotangents have the types of what they belong to, and residuals may be only arrays.
        return out, [grad.astype(leaf.dtype) for grad, leaf in zip(grads, trained, strict=True)]

    def backward(grads: list[Array], cotangent: Any) -> Any:
        return [grad * cotangent[0].astype(grad.dtype) for grad in grads], None, None, None

    total.defvjp(forward, backward)
    return total(trained, fixed, pieces, used)
