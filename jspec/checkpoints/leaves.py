"""From named tensors in a file to the leaves of a module: accounting first, then one leaf at a time."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, runtime_checkable

import jax
import numpy as np
from jax.sharding import Mesh

from jspec.net import Leaf, Params
from jspec.sharding import leaf_sharding

Transform = Callable[[np.ndarray], np.ndarray]


@runtime_checkable
class TensorFile(Protocol):
    """An open checkpoint: what is in it, and one tensor at a time."""

    @property
    def where(self) -> str:
        """To name it in errors."""
        ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor, rows first whatever the format calls it."""
        ...

    def check_type(self, name: str, *, integer: bool = False) -> None:
        """Raises ValueError if `read` cannot give this tensor's values as numbers of the kind asked for."""
        ...

    def read(self, name: str) -> np.ndarray:
        """The tensor's values, as a view of the file where its type allows that."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Origin:
    """Where a leaf comes from."""

    name: str
    transposed: bool = False  # the file holds [out, in], the leaf [in, out]
    transform: Transform | None = None  # on the file's layout; keeps the shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """How a checkpoint becomes a module's leaves."""

    origins: Mapping[str, Origin]  # by leaf path
    copies: Sequence[tuple[str, str]] = ()  # tensors that may be there if equal to another one
    ignored: str = r"(?!)"  # pattern of tensors that the maths does not need


def check_tensors(identity: str, leaves: Sequence[Leaf], plan: Plan, file: TensorFile) -> None:
    """Accounts for every tensor before any is read.

    Args:
      identity: names what the config describes in errors.
      leaves: what is wanted, of any dtype.
      plan: where it comes from.
      file: all of its tensors have to be asked for, ignored or copies.

    Raises:
      ValueError: on a missing tensor, one that nothing asks for, or one of another shape.
    """
    names = {origin.name for origin in plan.origins.values()}
    missing = sorted(names - set(file.shapes))
    if missing:
        raise ValueError(
            f"{file.where}: expected tensor {missing[0]!r}{_more(missing)}, got none; "
            f"the checkpoint is incomplete or its config is not this model's ({identity})"
        )
    allowed = names | {copy for copy, _ in plan.copies}
    unknown = sorted(n for n in file.shapes if n not in allowed and not re.search(plan.ignored, n))
    if unknown:
        raise ValueError(
            f"{file.where}: expected no tensor {unknown[0]!r}{_more(unknown)}; "
            f"its config describes a model without it ({identity})"
        )
    for leaf in leaves:
        origin = plan.origins[leaf.path]
        expected = leaf.shape[::-1] if origin.transposed else leaf.shape
        if file.shapes[origin.name] != expected:
            raise ValueError(
                f"{file.where}: expected shape {list(expected)} for tensor {origin.name!r}, "
                f"got {list(file.shapes[origin.name])}; config and weights do not belong together"
            )
        if np.issubdtype(leaf.dtype, np.integer):
            file.check_type(origin.name, integer=True)
        else:
            file.check_type(origin.name)
    for copy, original in plan.copies:
        if copy in file.shapes and not np.array_equal(file.read(copy), file.read(original)):
            raise ValueError(
                f"{file.where}: expected tensor {copy!r} to equal {original!r}, as the config ties them, "
                "got other values; set tie_word_embeddings to false if both are meant"
            )


def read_leaves(
    leaves: Sequence[Leaf],
    plan: Plan,
    file: TensorFile,
    units: Mapping[str, int],
    mesh: Mesh | None,
    *,
    replicated: bool = False,
) -> Params:
    """Streams all leaves to their dtype and devices; at no time is more than one leaf held twice.

    Args:
      leaves: what is wanted, in the dtypes that it is wanted in; it may have copies of the file's KV heads.
      plan: where it comes from.
      file: checked by `check_tensors`.
      units: see `jspec.sharding.leaf_sharding`.
      mesh: splits the leaves; None = the default device.
      replicated: the mesh does not split them: every device gets all of them.

    Raises:
      ValueError: if the mesh cannot split them.
    """
    shardings = [
        None if mesh is None else leaf_sharding(() if replicated else leaf.axes, units, mesh)
        for leaf in leaves
    ]
    return tuple(
        _place(_copied(_values(plan.origins[leaf.path], file), leaf, units), leaf, sharding)
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )


def _values(origin: Origin, file: TensorFile) -> np.ndarray:
    values = file.read(origin.name)
    if origin.transform is not None:
        values = origin.transform(values)
    return values.T if origin.transposed else values


def _copied(values: np.ndarray, leaf: Leaf, units: Mapping[str, int]) -> np.ndarray:
    """Every KV head as often as the leaf has it, copies side by side (see `DecoderConfig.kv_copies`)."""
    if "kv_heads" not in leaf.axes or values.shape == leaf.shape:
        return values
    axis, heads = leaf.axes.index("kv_heads"), units["kv_heads"]
    size = leaf.shape[axis] // heads
    own = values.shape[axis] // size
    pieces = values.reshape(*values.shape[:axis], own, size, *values.shape[axis + 1 :])
    return np.repeat(pieces, heads // own, axis=axis).reshape(leaf.shape)


def _place(values: np.ndarray, leaf: Leaf, sharding: jax.sharding.Sharding | None) -> jax.Array:
    # Always a fresh array: the device may keep it as it is, and it must not be the file's memory.
    if sharding is None:
        return jax.device_put(np.array(values, dtype=leaf.dtype, order="C")).block_until_ready()
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: np.array(values[index], dtype=leaf.dtype, order="C")
    ).block_until_ready()


def _more(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
