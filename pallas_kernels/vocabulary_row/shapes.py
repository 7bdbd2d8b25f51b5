"""Named shapes of `temper` that are compiled for TPUs."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.ahead.topology import tpu_mesh
from pallas_kernels.vocabulary_row import tpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledShape:
    """One call, in place."""

    rows: int
    vocabulary: int
    draws: bool = True

    def arguments(self) -> tuple:
        """Of one call."""
        number = jnp.zeros((self.rows,))
        settings = number, jnp.zeros((self.rows,), jnp.int32), number, number
        return jnp.zeros((self.rows, self.vocabulary)), *settings, *([number] if self.draws else [])

    def case(self, generation: str) -> tuple[Mesh, Callable, tuple, tuple[int, ...]]:
        """Mesh, function, abstract arguments and donated ones, for `ahead.topology.compile_for`."""
        return tpu_mesh(generation), tpu.temper, jax.eval_shape(self.arguments), (0,)


COMPILED: dict[str, CompiledShape] = {
    "nodes": CompiledShape(rows=128, vocabulary=151_936, draws=False),
    "plain": CompiledShape(rows=16, vocabulary=151_936),
    "one row": CompiledShape(rows=1, vocabulary=49_152),
    "widest": CompiledShape(rows=12, vocabulary=262_144),
    "odd": CompiledShape(rows=20, vocabulary=32_003),
}
