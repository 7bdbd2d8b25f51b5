"""Named shapes of `commit_rows` that are compiled for TPUs."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.ahead.topology import tpu_mesh
from pallas_kernels.attention.pages import allocate
from pallas_kernels.commit import tpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledShape:
    """One call; every slot may commit so many of the nodes."""

    slots: int
    commits: int
    nodes: int
    context: int = 4096
    kv_heads: int = 8
    head_size: int = 128
    page_size: int = 128
    layers: int = 36
    dtype: str = "bfloat16"

    def arguments(self) -> tuple:
        """Of one call; to be traced, because they may not fit into memory."""
        columns = self.context // self.page_size
        pages = allocate(
            num_layers=self.layers,
            num_pages=self.slots * columns,
            page_size=self.page_size,
            num_kv_heads=self.kv_heads,
            head_size=self.head_size,
            dtype=self.dtype,
            platform="tpu",
        )
        new = jnp.zeros((self.layers, self.nodes, self.kv_heads, self.head_size), self.dtype)
        path = jnp.zeros((self.slots, self.commits), jnp.int32)
        page_table = jnp.zeros((self.slots, columns), jnp.int32)
        return pages, new, new, path, page_table, jnp.zeros((self.slots,), jnp.int32)

    def case(self, generation: str) -> tuple[Mesh, Callable, tuple, tuple[int, ...]]:
        """Mesh, function, abstract arguments and donated ones, for `ahead.topology.compile_for`."""
        return tpu_mesh(generation), tpu.commit_rows, jax.eval_shape(self.arguments), (0,)


COMPILED: dict[str, CompiledShape] = {
    "round": CompiledShape(slots=16, commits=9, nodes=128),
    "chunk": CompiledShape(slots=2, commits=520, nodes=528),
    "small heads": CompiledShape(slots=4, commits=9, nodes=32, kv_heads=3, head_size=64, layers=30),
    "float32": CompiledShape(
        slots=4, commits=9, nodes=32, kv_heads=2, head_size=96, layers=4, dtype="float32"
    ),
}
