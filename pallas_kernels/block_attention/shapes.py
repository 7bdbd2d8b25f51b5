"""Named shapes of `attend_blocks` that are compiled for TPUs, forward and backward."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.ahead.topology import tpu_mesh
from pallas_kernels.block_attention.api import attend_blocks


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledShape:
    """One layer of a training step."""

    rows: int = 1
    blocks: int = 512
    block_size: int = 16
    tokens: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_size: int = 128
    dtype: str = "bfloat16"
    causal: bool = False
    window: int | None = None

    @property
    def operand_bytes(self) -> int:
        """Queries, keys and values of the blocks, and of the context."""
        rows = self.blocks * self.block_size * (self.heads + 2 * self.kv_heads)
        size = self.head_size * jnp.dtype(self.dtype).itemsize
        return self.rows * (rows + 2 * self.tokens * self.kv_heads) * size

    @property
    def score_bytes(self) -> int:
        """What is never made: float32 scores of every head, block row and token."""
        return 4 * self.rows * self.heads * self.blocks * self.block_size * self.tokens

    def arguments(self) -> tuple:
        """Of one call."""
        block = (self.rows, self.blocks, self.block_size)
        own = jnp.zeros((*block, self.kv_heads, self.head_size), self.dtype)
        context = jnp.zeros((self.rows, self.tokens, self.kv_heads, self.head_size), self.dtype)
        places = jnp.zeros(block[:2], jnp.int32)
        q = jnp.zeros((*block, self.heads, self.head_size), self.dtype)
        return q, own, own, context, context, places, places

    def case(self, generation: str) -> tuple[Mesh, Callable, tuple, tuple[int, ...]]:
        """Mesh, function, abstract arguments and donated ones, for `ahead.topology.compile_for`."""

        def run(*arguments: jax.Array) -> tuple[jax.Array, ...]:
            def loss(*floats: jax.Array) -> jax.Array:
                out = attend_blocks(
                    *floats,
                    *arguments[5:],
                    scale=self.head_size**-0.5,
                    causal=self.causal,
                    window=self.window,
                    implementation="tpu",
                )
                return jnp.sum(out.astype(jnp.float32) ** 2)

            return jax.grad(loss, argnums=tuple(range(5)))(*arguments[:5])

        return tpu_mesh(generation), run, jax.eval_shape(self.arguments), ()


COMPILED: dict[str, CompiledShape] = {
    "qwen3 8b": CompiledShape(),
    "window": CompiledShape(rows=2, blocks=64, block_size=10, tokens=1000, heads=8, causal=True, window=512),
    "float32": CompiledShape(
        blocks=40, block_size=7, tokens=300, heads=9, kv_heads=3, head_size=64, dtype="float32"
    ),
}
