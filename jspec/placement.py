"""Where the arrays of a round lie on the mesh in use: what a program returns lies as what it was given."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jspec.heads import split_axis
from pallas_kernels.attention.pages import Pages

T = TypeVar("T")


def page_specs(state: T) -> T:
    """A spec per array: pages are split over their KV heads, all else is whole on every device."""

    def spec(part: Any) -> Any:
        if not isinstance(part, Pages):
            return PartitionSpec()
        pool = PartitionSpec(None, None, split_axis(part))
        return jax.tree.map(lambda _: pool, part)

    return jax.tree.map(spec, state, is_leaf=lambda part: isinstance(part, Pages))


def split_pages(state: T) -> T:
    """The same arrays, with pages split and integers and flags whole; floats outside of pages as the compiler likes.

    To be called in a program whose mesh is in use.
    """

    def place(value: jax.Array, spec: PartitionSpec) -> jax.Array:
        is_free = spec == PartitionSpec() and jnp.issubdtype(value.dtype, jnp.floating)
        return value if is_free else jax.lax.with_sharding_constraint(value, spec)

    if jax.sharding.get_abstract_mesh().empty:
        return state
    return jax.tree.map(place, state, page_specs(state))


def whole(values: T) -> T:
    """The same arrays, whole on every device, so that every process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return values
    return jax.tree.map(lambda value: jax.lax.with_sharding_constraint(value, PartitionSpec()), values)
