"""One table from logical axis names to mesh axes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

T = TypeVar("T")

# Logical axis -> mesh axis that splits it. Axes that are absent, or whose mesh axis the mesh does
# not have, are whole on every device.
MESH_AXES = {"vocabulary": "tensor", "heads": "tensor", "kv_heads": "tensor", "mlp": "tensor"}

# These stay whole where the mesh axis does not divide them: few KV heads are usually copied to more
# devices than there are heads, and vocabularies are often odd. The rest must divide.
WHOLE_IF_UNEVEN = frozenset({"kv_heads", "vocabulary"})


def make_mesh(*, tensor: int, data: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh with the axes `data` and `tensor`, which is the inner one.

    Raises:
      ValueError: if there are fewer devices.
    """
    devices = jax.devices() if devices is None else devices
    if min(tensor, data) < 1 or len(devices) < tensor * data:
        raise ValueError(f"mesh: expected data {data} x tensor {tensor} devices, got {len(devices)}")
    return Mesh(np.array(devices[: data * tensor]).reshape(data, tensor), ("data", "tensor"))


def mesh_of(arrays: Any) -> Mesh | None:
    """The mesh of several devices on which a pytree's leaves lie; None if they are on one device."""
    for leaf in jax.tree.leaves(arrays):
        sharding = getattr(leaf, "sharding", None)
        mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
        if isinstance(mesh, Mesh) and mesh.size > 1:
            return mesh
    return None


def on_every_device(run: Callable[..., Any], *, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    """`run`, called by each device of the mesh in use (`jax.set_mesh`) with its part; without one, as it is.

    For what may be a kernel: the compiler cannot split one, and JAX refuses to lower it for several devices
    even where all of them have everything.

    Args:
      run: of arrays.
      in_specs: how its arguments are split.
      out_specs: how its results are.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = set(mesh.axis_names) - set(mesh.manual_axes)
    if not axes:
        return run
    # Kernels do not say over which axes their results vary.
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names=axes, check_vma=False)


def parts_of(axis: str, pieces: int) -> int:
    """Into how many parts the mesh in use splits a logical axis; 1 = every device has all of it."""
    mesh = jax.sharding.get_abstract_mesh()
    mesh_axis = MESH_AXES[axis]
    parts = 1 if mesh_axis in mesh.manual_axes else mesh.shape.get(mesh_axis, 1)
    return parts if pieces % parts == 0 else 1


def mesh_axis_of(axis: str, pieces: int) -> str | None:
    """The axis of the mesh in use that splits a logical axis; None = every device has all of it."""
    return MESH_AXES[axis] if parts_of(axis, pieces) > 1 else None


def first_decides(values: T) -> T:
    """The first device's values, on every device of the mesh in use: one sum of integers.

    Devices that should have the same numbers may not: sums are rounded in another order, a bit flips. What
    they decide on these numbers (what is verified, what is accepted) must be the same everywhere, as all that
    follows depends on it, so one of them decides.

    Args:
      values: arrays of int32 or float32, whole on every device. Floats travel as their bits.
    """
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(name for name in mesh.axis_names if name not in mesh.manual_axes)
    leaves, tree = jax.tree.flatten(values)
    if not leaves or all(mesh.shape[name] == 1 for name in axes):
        return values

    def run(*leaves: jax.Array) -> jax.Array:
        bits = jnp.concatenate([jax.lax.bitcast_convert_type(x, jnp.int32).reshape(-1) for x in leaves])
        return jax.lax.psum(jnp.where(jax.lax.axis_index(axes) == 0, bits, 0), axes)

    whole = PartitionSpec()
    packed = jax.shard_map(run, in_specs=whole, out_specs=whole, axis_names=set(axes))(*leaves)
    cuts = np.cumsum([leaf.size for leaf in leaves])[:-1]
    decided = [
        jax.lax.bitcast_convert_type(part.reshape(leaf.shape), leaf.dtype)
        for part, leaf in zip(jnp.split(packed, cuts), leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, decided)


def first_process_decides(numbers: Sequence[int]) -> tuple[int, ...]:
    """The first process's numbers, in every process: for what hosts decide by clocks, or by what is ready."""
    if jax.process_count() == 1:
        return tuple(numbers)
    agreed = multihost_utils.broadcast_one_to_all(np.asarray(numbers, np.int32))
    return tuple(int(number) for number in agreed)


def leaf_sharding(axes: Sequence[str], units: Mapping[str, int], mesh: Mesh) -> NamedSharding:
    """Where an array with these logical axes lives.

    Args:
      axes: logical name of each dimension of the array.
      units: per logical axis, how many indivisible pieces it has (heads, not features of heads).
      mesh: its axis names are looked up in `MESH_AXES`.

    Raises:
      ValueError: if a mesh axis does not divide a logical axis that has to be split evenly, or if the
        mesh is not one whose shardings the compiler propagates.
    """
    if any(kind != AxisType.Auto for kind in mesh.axis_types):
        raise ValueError(
            f"mesh: expected axes of type Auto, got {mesh.axis_types}; use jspec.sharding.make_mesh, "
            "or pass axis_types to jax.make_mesh"
        )
    return NamedSharding(mesh, PartitionSpec(*(_mesh_axis(axis, units, mesh) for axis in axes)))


def _mesh_axis(axis: str, units: Mapping[str, int], mesh: Mesh) -> str | None:
    mesh_axis = MESH_AXES.get(axis)
    if mesh_axis is None or mesh_axis not in mesh.shape:
        return None
    pieces, parts = units[axis], mesh.shape[mesh_axis]
    if pieces % parts == 0:
        return mesh_axis
    if axis in WHOLE_IF_UNEVEN:
        return None
    raise ValueError(
        f"mesh: expected an axis {mesh_axis!r} that divides the model's {pieces} {axis}, got {parts}; "
        "use fewer devices along it"
    )
