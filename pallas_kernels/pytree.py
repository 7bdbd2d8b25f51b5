"""Frozen keyword-only dataclasses that JAX can walk through."""

import dataclasses
from typing import Any, TypeVar, dataclass_transform

import jax

T = TypeVar("T")


def static(**options: Any) -> Any:
    """A field that is part of the tree's structure: hashable, never traced."""
    return dataclasses.field(metadata={"static": True}, **options)


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, dataclasses.field))
def pytree(cls: type[T]) -> type[T]:
    """Makes `cls` a frozen keyword-only dataclass and registers it with JAX.

    Rebuilding an instance from its leaves goes around `__init__`: JAX puts shapes, sharding
    specifications and sentinels where arrays stand, and a run-time shape check of `__init__`
    (the jaxtyping hook in the tests) would refuse those. Real construction is still checked.
    """
    cls = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    data = tuple(f.name for f in fields if not f.metadata.get("static"))
    meta = tuple(f.name for f in fields if f.metadata.get("static"))

    def flatten(value: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(getattr(value, n) for n in data), tuple(getattr(value, n) for n in meta)

    def flatten_with_keys(value: Any) -> tuple[Any, tuple[Any, ...]]:
        children, structure = flatten(value)
        return [(jax.tree_util.GetAttrKey(n), c) for n, c in zip(data, children, strict=True)], structure

    def unflatten(structure: tuple[Any, ...], children: Any) -> Any:
        value = object.__new__(cls)
        for name, child in zip(data, children, strict=True):
            object.__setattr__(value, name, child)
        for name, item in zip(meta, structure, strict=True):
            object.__setattr__(value, name, item)
        return value

    jax.tree_util.register_pytree_with_keys(cls, flatten_with_keys, unflatten, flatten)
    return cls
