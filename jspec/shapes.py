"""Named rounds of a Qwen3-8B-shaped target that are compiled for TPUs; no weight is ever made."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jspec.buckets import Bucket
from jspec.cache import new_cache
from jspec.decode import Method, Models, State, execute, propose, settle
from jspec.drafters.dflash import dflash, dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.net import Leaf
from jspec.sharding import leaf_sharding
from jspec.slots import empty_slots
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves, decoder_units
from jspec.targets.rope import Rope
from jspec.targets.view import TargetView
from pallas_kernels.ahead.topology import tpu_mesh

QWEN3_8B = DecoderConfig(
    architecture="qwen3",
    vocab_size=151_936,
    hidden_size=4096,
    intermediate_size=12_288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_size=128,
    norm_eps=1e-6,
    max_context=40_960,
    full_rope=Rope(theta=1e6),
    layer_kinds=("full",) * 36,
    query_key_norm=True,
    query_scale=128**-0.5,
)

# The published DFlash drafter of that target: five of its layers, blocks of 16.
DFLASH_QWEN3_8B = DFlashConfig(
    decoder=dataclasses.replace(QWEN3_8B, num_layers=5, layer_kinds=("full",) * 5),
    block_size=16,
    mask_token_id=151_669,
    target_layer_ids=(1, 9, 17, 25, 33),
    num_target_layers=36,
    target_hidden_size=4096,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledRound:
    """One of the three programs of a round, for a bucket, on so many devices."""

    kind: Literal["propose", "execute", "settle"]
    lanes: int
    draft_length: int
    chunk: int = 0
    max_slots: int = 16
    max_context: int = 4096
    page_size: int = 128
    tensor: int = 1  # devices over which heads, MLP and vocabulary are split
    layers: int = QWEN3_8B.num_layers  # fewer compile sooner, and differ in nothing that is not per layer

    @property
    def bucket(self) -> Bucket:
        """Its static shape."""
        return Bucket(lanes=self.lanes, nodes=self.lanes * (1 + self.draft_length), chunk=self.chunk)

    @property
    def pool_bytes(self) -> int:
        """Of the target's committed keys and values, over all devices."""
        tokens = self.max_slots * self.max_context
        return tokens * self.layers * 2 * QWEN3_8B.num_kv_heads * QWEN3_8B.head_size * 2

    def case(self, generation: str) -> tuple[Mesh, Callable, tuple, tuple[int, ...]]:
        """Mesh, function, abstract arguments and donated ones, for `ahead.topology.compile_for`."""
        described = tpu_mesh(generation, (1, self.tensor), ("data", "tensor"))
        mesh = Mesh(described.devices, described.axis_names, axis_types=(AxisType.Auto,) * 2)
        config = dataclasses.replace(QWEN3_8B, num_layers=self.layers, layer_kinds=("full",) * self.layers)
        drafter = dataclasses.replace(
            DFLASH_QWEN3_8B,
            num_target_layers=self.layers,
            target_layer_ids=tuple(i for i in DFLASH_QWEN3_8B.target_layer_ids if i < self.layers),
        )
        method = Method(target=DecoderTarget(config), drafter=dflash(drafter, draft_length=self.draft_length))
        models = Models(
            target=_placed(decoder_leaves(config, jnp.dtype(jnp.bfloat16)), config, mesh),
            drafter=_placed(dflash_leaves(drafter, jnp.dtype(jnp.bfloat16)), drafter.decoder, mesh),
        )
        state = self._state(method, models, mesh)
        lanes = jax.ShapeDtypeStruct((self.lanes,), np.int32)
        budget = jax.ShapeDtypeStruct((), np.int32)

        def proposed(models: Models, state: State, lanes: Any, certain: Any, budget: Any) -> Any:
            return propose(method, self.bucket, models, state, lanes, certain, budget)

        def executed(models: Models, nodes: Any, cache: Any, lanes: Any) -> Any:
            return execute(method, self.bucket, models, nodes, cache, lanes)

        def settled(state: State, models: Models, round_: Any, executed: Any, lanes: Any) -> Any:
            return settle(method, self.bucket, models, round_, executed, state, lanes, None)

        if self.kind == "propose":
            return mesh, proposed, (models, state, lanes, lanes, budget), ()
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            round_ = jax.eval_shape(proposed, models, state, lanes, lanes, budget)
            if self.kind == "execute":
                return mesh, executed, (models, round_.nodes, state.cache, lanes), ()
            made = jax.eval_shape(executed, models, round_.nodes, state.cache, lanes)
        # As the compiler splits what execute returns.
        by_leaf = {2: PartitionSpec(None, "tensor"), 4: PartitionSpec(None, None, "tensor")}
        logits, pending = (
            jax.tree.map(
                lambda leaf: jax.ShapeDtypeStruct(
                    leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, by_leaf[leaf.ndim])
                ),
                part,
            )
            for part in (made.logits, made.pending)
        )
        made = dataclasses.replace(made, logits=logits, pending=pending)
        return mesh, settled, (state, models, round_, made, lanes), (0,)

    def _state(self, method: Method, models: Models, mesh: Mesh) -> State:
        pages = self.max_slots * self.max_context // self.page_size

        def state(models: Models) -> State:
            target = method.target
            cache = new_cache(
                target.groups,
                max_slots=self.max_slots,
                num_pages=(pages,),
                page_size=self.page_size,
                max_context=self.max_context,
                dtype=jnp.bfloat16,
            )
            view = TargetView(params=models.target, cache=cache, target=target)
            return State(
                cache=cache,
                drafter=method.drafter.init(models.drafter, view, self.max_slots),
                slots=empty_slots(self.max_slots, self.max_context, target.vocab_size, 8),
            )

        split = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))

        def placed(leaf: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            if leaf.ndim != 5:  # all but the pools
                return leaf
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=split)

        return jax.tree.map(placed, jax.eval_shape(state, models))


def _placed(leaves: tuple[Leaf, ...], config: DecoderConfig, mesh: Mesh) -> tuple[jax.ShapeDtypeStruct, ...]:
    units = decoder_units(config)
    return tuple(
        jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf_sharding(leaf.axes, units, mesh))
        for leaf in leaves
    )


COMPILED: dict[str, CompiledRound] = {
    **{
        f"{kind} 16x8": CompiledRound(kind=kind, lanes=16, draft_length=7)
        for kind in ("propose", "execute", "settle")
    },
    "execute chunk": CompiledRound(kind="execute", lanes=1, draft_length=0, chunk=512),
    "settle chunk": CompiledRound(kind="settle", lanes=1, draft_length=0, chunk=512),
    **{
        f"{kind} 16x8 on {parts}": CompiledRound(kind=kind, lanes=16, draft_length=7, tensor=parts)
        for parts in (4, 8)
        for kind in ("propose", "execute", "settle")
    },
}
