"""Where the arrays of a round lie on the mesh in use: what a program returns lies as what it was given."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jax.tree_util import keystr, tree_map_with_path

from jspec.heads import split_axis
from jspec.sharding import mesh_axis_of
from pallas_kernels.attention.pages import Pages

T = TypeVar("T")

# Of `jspec.decode.State`: a row per slot over the vocabulary, split as the logits that they meet.
OVER_VOCABULARY = frozenset(
    {".slots.table.bias", ".slots.history.output_counts", ".slots.history.prompt_seen"}
)


def state_specs(state: T) -> T:
    """A spec per array: pages are split over KV heads, some rows over the vocabulary, no other array."""

    def spec(path: Any, part: Any) -> Any:
        if isinstance(part, Pages):
            pool = PartitionSpec(None, None, split_axis(part))
            return jax.tree.map(lambda _: pool, part)
        if keystr(path) not in OVER_VOCABULARY:
            return PartitionSpec()
        axis = mesh_axis_of("vocabulary", part.shape[1])
        return PartitionSpec() if axis is None else PartitionSpec(None, axis)

    return tree_map_with_path(spec, state, is_leaf=lambda part: isinstance(part, Pages))


def place_state(state: T) -> T:
    """The same arrays where `state_specs` says; of those that are whole, floats lie as the compiler likes.

    To be called in a program whose mesh is in use.
    """

    def place(value: jax.Array, spec: PartitionSpec) -> jax.Array:
        is_free = spec == PartitionSpec() and jnp.issubdtype(value.dtype, jnp.floating)
        return value if is_free else jax.lax.with_sharding_constraint(value, spec)

    if jax.sharding.get_abstract_mesh().empty:
        return state
    return jax.tree.map(place, state, state_specs(state))


def whole(values: T) -> T:
    """The same arrays, whole on every device, so that every process can read them."""
    if jax.sharding.get_abstract_mesh().empty:
        return values
    return jax.tree.map(lambda value: jax.lax.with_sharding_constraint(value, PartitionSpec()), values)
