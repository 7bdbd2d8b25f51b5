"""An nnx module as a flat tuple of arrays: split once by its structure, put together in traced code."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar, cast, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

Params = tuple[Array, ...]


@runtime_checkable
class NetConfig(Protocol):
    """What a module is made from: a hashable value that can name itself."""

    @property
    def identity(self) -> str:
        """To name the model in errors."""
        ...


C = TypeVar("C", bound=NetConfig)
M = TypeVar("M", bound=nnx.Module)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Leaf:
    """One array of a module's parameters."""

    path: str  # "layers.3.attention.query"
    shape: tuple[int, ...]
    dtype: jnp.dtype
    axes: tuple[str, ...]  # logical name of each axis


@dataclasses.dataclass(frozen=True, kw_only=True)
class Net(Generic[M]):
    """The structure of a module without its arrays."""

    owner: str  # identity of its config
    leaves: tuple[Leaf, ...]
    graph: Any
    tree: Any

    def module(self, params: Params) -> M:
        """The module around its arrays, which come in the order of `leaves`.

        Raises:
          ValueError: naming the owner, if they are not as many.
        """
        if len(params) != len(self.leaves):
            raise ValueError(
                f"params: expected {len(self.leaves)} arrays of {self.owner}, got {len(params)}; "
                "pass the ones that were loaded with it"
            )
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, params))


def net_of(kind: Callable[[C, jnp.dtype], M], config: C, dtype: jnp.dtype) -> Net[M]:
    """The structure of `kind(config, dtype)`, worked out once without making an array."""
    return cast(Net[M], _net_of(kind, config, jnp.dtype(dtype)))


@functools.cache
def _net_of(kind: Callable[..., Any], config: NetConfig, dtype: jnp.dtype) -> Net[Any]:
    graph, state = nnx.split(nnx.eval_shape(lambda: kind(config, dtype)))
    leaves = tuple(
        Leaf(
            path=".".join(str(part) for part in path),
            shape=variable.get_value().shape,
            dtype=variable.get_value().dtype,
            axes=variable.get_metadata("axes"),
        )
        for path, variable in nnx.to_flat_state(state)
    )
    return Net(owner=config.identity, leaves=leaves, graph=graph, tree=jax.tree.structure(state))
