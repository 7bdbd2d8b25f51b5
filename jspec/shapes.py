"""Named rounds of a Qwen3-8B-shaped target that are compiled for TPUs; no weight is ever made."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from jspec.buckets import Bucket
from jspec.drafters.dflash import dflash, dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.planning.rounds import KINDS, DescribedDrafter, DescribedEngine, Kind
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope
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

    kind: Kind
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

    def engine(self, mesh: Mesh) -> DescribedEngine:
        """The engine whose programs are compiled."""
        config = dataclasses.replace(QWEN3_8B, num_layers=self.layers, layer_kinds=("full",) * self.layers)
        drafter = dataclasses.replace(
            DFLASH_QWEN3_8B,
            num_target_layers=self.layers,
            target_layer_ids=tuple(i for i in DFLASH_QWEN3_8B.target_layer_ids if i < self.layers),
        )
        return DescribedEngine(
            target=config,
            drafter=DescribedDrafter(
                drafter=dflash(drafter, draft_length=self.draft_length or None),
                leaves=dflash_leaves(drafter, jnp.dtype(jnp.bfloat16)),
                decoder=drafter.decoder,
            ),
            mesh=mesh,
            max_slots=self.max_slots,
            max_context=self.max_context,
            page_size=self.page_size,
        )

    def case(self, generation: str) -> tuple[Mesh, Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        """Mesh, function, abstract arguments and donated ones, for `ahead.topology.compile_for`."""
        mesh = tpu_mesh(generation, (1, self.tensor), ("data", "tensor"))
        return mesh, *self.engine(mesh).program(self.kind, self.bucket)


COMPILED: dict[str, CompiledRound] = {
    **{f"{kind} 16x8": CompiledRound(kind=kind, lanes=16, draft_length=7) for kind in KINDS},
    "execute chunk": CompiledRound(kind="execute", lanes=1, draft_length=0, chunk=512),
    "settle chunk": CompiledRound(kind="settle", lanes=1, draft_length=0, chunk=512),
    **{
        f"{kind} 16x8 on {parts}": CompiledRound(kind=kind, lanes=16, draft_length=7, tensor=parts)
        for parts in (4, 8)
        for kind in KINDS
    },
}
