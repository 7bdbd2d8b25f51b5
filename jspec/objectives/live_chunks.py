"""A loss summed over the rows that have one, with the gradient made along the way.

The usual way, a scan under `jax.checkpoint`, computes every chunk twice, and touches all weights for chunks
in which nothing is supervised. Here the chunks that have something are computed once: the loss is a sum, so
its gradient is the sum of the chunks' gradients, whatever the loss is multiplied with later.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

S = TypeVar("S")
P = TypeVar("P")
W = TypeVar("W")

Pieces = tuple[list[Array], list[Array]]  # arrays that gradients flow to, and others


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
        arrays that gradients flow to: JAX raises then.
      theta: what gradients flow to, summed over chunks in float32. Arrays of integers in it are constants.
      constants: whatever else `terms_of` needs; no gradient flows to it.
      items: a pytree of arrays with one leading axis in common; gradients flow to those of floats, and are
        zero for items of chunks that are not computed. Masks are bools, so that nothing is made for them.
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

    used = -(-jnp.sum(live, dtype=jnp.int32) // chunk)
    trained, kept, whole_theta = _parted(theta)
    moving, others, whole_items = _parted(jax.tree.map(split, items))

    def at(trained: list[Array], fixed: tuple[list[Array], Any], piece: Pieces) -> tuple[Array, S]:
        return terms_of(whole_theta(trained, fixed[0]), fixed[1], whole_items(*piece))

    value, sums = _total(at, trained, (kept, constants), (moving, others), used)
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


def _total(at: Callable[..., Any], trained: list[Array], fixed: Any, pieces: Pieces, used: Array) -> Any:
    """`at` of the trained arrays, the fixed ones and a piece, summed over the first `used` pieces."""

    def piece_at(index: Array, pieces: Pieces) -> Pieces:
        return jax.tree.map(lambda a: a[index], pieces)

    def start(body: Callable[[Pieces], Any], pieces: Pieces) -> Any:
        shapes = jax.eval_shape(body, piece_at(jnp.int32(0), pieces))
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), shapes)

    @jax.custom_vjp
    def total(trained: list[Array], fixed: Any, pieces: Pieces, used: Array) -> Any:
        def body(piece: Pieces) -> Any:
            return at(trained, fixed, piece)

        def add(index: Array, total: Any) -> Any:
            return jax.tree.map(jnp.add, total, body(piece_at(index, pieces)))

        return jax.lax.fori_loop(0, used, add, start(body, pieces))

    def forward(trained: list[Array], fixed: Any, pieces: Pieces, used: Array) -> Any:
        def body(piece: Pieces) -> tuple[Any, list[Array], list[Array]]:
            def of(trained: list[Array], moving: list[Array]) -> Any:
                return at(trained, fixed, (moving, piece[1]))

            out, (own, moved) = jax.value_and_grad(of, argnums=(0, 1), has_aux=True)(trained, piece[0])
            return out, [grad.astype(jnp.float32) for grad in own], moved

        def add(index: Array, total: Any) -> Any:
            out, own, moved = body(piece_at(index, pieces))
            written = [whole.at[index].set(part) for whole, part in zip(total[2], moved, strict=True)]
            return *jax.tree.map(jnp.add, total[:2], (out, own)), written

        out, own, _ = start(body, pieces)
        out, own, moved = jax.lax.fori_loop(0, used, add, (out, own, jax.tree.map(jnp.zeros_like, pieces[0])))
        # Cotangents have the types of what they belong to, and residuals may be only arrays.
        own = [grad.astype(leaf.dtype) for grad, leaf in zip(own, trained, strict=True)]
        return out, (own, moved)

    def backward(grads: tuple[list[Array], list[Array]], cotangent: Any) -> Any:
        own, moved = jax.tree.map(lambda grad: (grad * cotangent[0]).astype(grad.dtype), grads)
        return own, None, (moved, None), None

    total.defvjp(forward, backward)
    return total(trained, fixed, pieces, used)


def _parted(tree: Any) -> tuple[list[Array], list[Array], Callable[[list[Array], list[Array]], Any]]:
    """A pytree's floating leaves, its others, and how to put it together again."""
    leaves, structure = jax.tree.flatten(tree)
    kinds = [jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in leaves]

    def joined(floating: list[Array], others: list[Array]) -> Any:
        given, kept = iter(floating), iter(others)
        return jax.tree.unflatten(structure, [next(given) if kind else next(kept) for kind in kinds])

    floating = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind]
    return floating, [leaf for leaf, kind in zip(leaves, kinds, strict=True) if not kind], joined
