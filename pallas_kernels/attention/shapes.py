"""Named shapes of `attend`: what tests, benchmarks and compile checks run, so that their numbers can be compared."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.ahead.topology import tpu_mesh
from pallas_kernels.attention import tpu
from pallas_kernels.attention.pages import allocate
from pallas_kernels.attention.sight import Sight


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """One call: every lane has the same number of nodes and the same context."""

    lanes: int
    nodes: int  # per lane; they are queries and in-flight keys
    context: int  # committed tokens per lane
    capacity: int = 2048  # tokens that a lane's page table can name
    heads: int = 9
    kv_heads: int = 3
    head_size: int = 64
    page_size: int = 256


# SmolLM2-135M's attention: 30 layers of this make a step.
DECODE: dict[str, AttentionShape] = {
    "decode": AttentionShape(lanes=1, nodes=1, context=200),
    "decode, long": AttentionShape(lanes=1, nodes=1, context=1000),
    "chain of 2": AttentionShape(lanes=1, nodes=2, context=200),
    "chain of 4": AttentionShape(lanes=1, nodes=4, context=200),
    "chain of 8": AttentionShape(lanes=1, nodes=8, context=200),
    "chain of 8, long": AttentionShape(lanes=1, nodes=8, context=1000),
    "4 lanes of 4": AttentionShape(lanes=4, nodes=4, context=200),
}

PREFILL: dict[str, AttentionShape] = {
    "first chunk": AttentionShape(lanes=1, nodes=256, context=0),
    "late chunk": AttentionShape(lanes=1, nodes=256, context=1500),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledShape:
    """One call that is compiled for a TPU."""

    slots: int
    nodes: int  # of each slot
    context: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    page_size: int = 128
    layers: int = 36
    words: int = 0  # of `Sight.visible`: 0 = causal
    dtype: str = "bfloat16"
    softcap: float | None = None
    sinks: bool = False
    logsumexp: bool = False

    def arguments(self) -> tuple:
        """Of one call; to be traced, because they may not fit into memory."""
        columns = -(-self.context // self.page_size)
        num_queries = self.slots * self.nodes
        pages = allocate(
            num_layers=self.layers,
            num_pages=self.slots * columns,
            page_size=self.page_size,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            platform="tpu",
        )
        ints = functools.partial(jnp.zeros, dtype=jnp.int32)
        sight = Sight(
            query_offsets=ints((self.slots + 1,)),
            key_offsets=ints((self.slots + 1,)),
            page_table=ints((self.slots, columns)),
            context_lengths=ints((self.slots,)),
            first_visible=ints((num_queries,)),
            causal=jnp.zeros((self.slots,), bool),
            visible=ints((num_queries, self.words)),
            max_queries=self.nodes,
            max_keys=self.nodes,
        )
        q = jnp.zeros((num_queries, self.heads, self.head_size), self.dtype)
        keys = jnp.zeros((num_queries, self.kv_heads, self.head_size), self.dtype)
        sinks = jnp.zeros((self.heads,), self.dtype) if self.sinks else None
        return q, keys, keys, pages, ints(()), sight, sinks

    def case(self, generation: str) -> tuple[Mesh, Callable, tuple, tuple[int, ...]]:
        """Mesh, function, abstract arguments and donated ones, for `ahead.topology.compile_for`."""

        def run(q, k, v, pages, layer, sight, sinks):
            out = tpu.attend(
                q, k, v, pages, layer, sight, 0.1, self.softcap, sinks, with_logsumexp=self.logsumexp
            )
            return out if self.logsumexp else out[0]

        return tpu_mesh(generation), run, jax.eval_shape(self.arguments), ()


COMPILED: dict[str, CompiledShape] = {
    "chain": CompiledShape(slots=16, nodes=8),
    "tree": CompiledShape(slots=16, nodes=8, words=1),
    "tree of 64": CompiledShape(slots=8, nodes=64, words=2),
    "chunk": CompiledShape(slots=2, nodes=512),
    "small heads": CompiledShape(
        slots=4, nodes=8, heads=9, kv_heads=3, head_size=64, sinks=True, logsumexp=True
    ),
    "heads of 80": CompiledShape(slots=4, nodes=8, heads=14, kv_heads=2, head_size=80, words=1),
    "heads of 96": CompiledShape(slots=4, nodes=8, heads=8, kv_heads=4, head_size=96, dtype="float32"),
    "heads of 256": CompiledShape(slots=4, nodes=8, heads=8, kv_heads=4, head_size=256, softcap=50.0),
}
