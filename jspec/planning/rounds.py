"""The programs of a round over weights and a cache that are only described: compiled, never run."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from jspec.buckets import Bucket
from jspec.cache import new_cache
from jspec.decode import Method, Models, State, execute, propose, settle
from jspec.drafters.protocol import Drafter
from jspec.net import Leaf
from jspec.placement import state_specs
from jspec.sharding import leaf_sharding, mesh_axis_of
from jspec.slots import empty_slots
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves, decoder_units
from jspec.targets.view import TargetView

Kind = Literal["propose", "execute", "settle"]
KINDS: tuple[Kind, ...] = ("propose", "execute", "settle")

# A function, its arguments and the numbers of the donated ones, as
# `pallas_kernels.ahead.topology.compile_for` wants them.
Described = tuple[Callable[..., Any], tuple[Any, ...], tuple[int, ...]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribedDrafter:
    """A drafter without its weights."""

    drafter: Drafter
    leaves: tuple[Leaf, ...]
    decoder: DecoderConfig | None  # of its layers; None = it has no weights


@dataclasses.dataclass(frozen=True, kw_only=True)
class DescribedEngine:
    """An engine on a mesh, of which nothing is allocated; fields as for `jspec.engine.Engine`."""

    target: DecoderConfig
    drafter: DescribedDrafter
    mesh: Mesh
    dtype: DTypeLike = jnp.bfloat16
    max_slots: int
    max_context: int
    page_size: int = 128
    max_stop_ids: int = 8

    @property
    def method(self) -> Method:
        """Static choices of its programs."""
        return Method(target=DecoderTarget(self.target), drafter=self.drafter.drafter)

    def models(self) -> Models:
        """Weights as shapes, split as they are when they are loaded to the mesh."""
        target = decoder_leaves(self.target, jnp.dtype(self.dtype))
        own = self.drafter
        units = {} if own.decoder is None else decoder_units(own.decoder)
        return Models(
            target=described(target, decoder_units(self.target), self.mesh),
            drafter=described(own.leaves, units, self.mesh),
        )

    def state(self, models: Models) -> State:
        """All slots, and a page for every token that they may hold."""
        target, pages = DecoderTarget(self.target), self.max_slots * -(-self.max_context // self.page_size)

        def state(models: Models) -> State:
            cache = new_cache(
                target.groups,
                max_slots=self.max_slots,
                num_pages=(pages,) * len(target.groups),
                page_size=self.page_size,
                max_context=self.max_context,
                dtype=self.dtype,
            )
            view = TargetView(params=models.target, cache=cache, target=target)
            return State(
                cache=cache,
                drafter=self.drafter.drafter.init(models.drafter, view, self.max_slots),
                slots=empty_slots(self.max_slots, self.max_context, target.vocab_size, self.max_stop_ids),
            )

        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            made = jax.eval_shape(state, models)
            return jax.tree.map(self._at, made, state_specs(made))

    def program(self, kind: Kind, bucket: Bucket) -> Described:
        """One of the three programs of a round in a bucket."""
        method, models = self.method, self.models()
        state = self.state(models)
        lanes = jax.ShapeDtypeStruct((bucket.lanes,), np.int32)
        budget = jax.ShapeDtypeStruct((), np.int32)

        def proposed(models: Models, state: State, lanes: Any, certain: Any, budget: Any) -> Any:
            return propose(method, bucket, models, state, lanes, certain, budget)

        def executed(models: Models, nodes: Any, cache: Any, lanes: Any) -> Any:
            return execute(method, bucket, models, nodes, cache, lanes)

        def settled(state: State, models: Models, round_: Any, executed: Any, lanes: Any) -> Any:
            return settle(method, bucket, models, round_, executed, state, lanes, None)

        if kind == "propose":
            return proposed, (models, state, lanes, lanes, budget), ()
        with jax.sharding.use_abstract_mesh(self.mesh.abstract_mesh):
            round_ = jax.eval_shape(proposed, models, state, lanes, lanes, budget)
            if kind == "execute":
                return executed, (models, round_.nodes, state.cache, lanes), ()
            made = jax.eval_shape(executed, models, round_.nodes, state.cache, lanes)
            # As the compiler splits what execute returns.
            vocabulary = mesh_axis_of("vocabulary", made.logits.shape[1])
            heads = mesh_axis_of("kv_heads", self.target.stored_kv_heads)
        (logits, *rest), tree = jax.tree.flatten(made)
        features, *pending = rest
        pending = [self._at(rows, PartitionSpec(None, None, heads)) for rows in pending]
        logits = self._at(logits, PartitionSpec(None, vocabulary))
        made = jax.tree.unflatten(tree, [logits, features, *pending])
        return settled, (state, models, round_, made, lanes), (0,)

    def embeddings_of(self, compiled: Any, arguments: tuple[Any, ...]) -> list[jax.ShapeDtypeStruct]:
        """Weights with a row per token id that a program reads: a few of the rows, whatever the table's size.

        Args:
          compiled: one of the programs.
          arguments: that it was compiled for, `Models` among them.
        """
        place = next(i for i, argument in enumerate(arguments) if isinstance(argument, Models))
        given, used = arguments[place], compiled.input_shardings[0][place]
        leaves = (*decoder_leaves(self.target, jnp.dtype(self.dtype)), *self.drafter.leaves)
        # What a program does not read has no sharding.
        return [
            array
            for leaf, array, sharding in zip(
                leaves, (*given.target, *given.drafter), (*used.target, *used.drafter), strict=True
            )
            if leaf.axes[:1] == ("vocabulary",) and sharding is not None
        ]

    def _at(self, array: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(self.mesh, spec))


def described(
    leaves: tuple[Leaf, ...], units: dict[str, int], mesh: Mesh
) -> tuple[jax.ShapeDtypeStruct, ...]:
    """Weights as shapes, split over a mesh as `jspec.sharding` says."""
    return tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding(leaf.axes, units, mesh))
        for leaf in leaves
    )
