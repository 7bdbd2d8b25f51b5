"""Named shapes of `allot` that are compiled for TPUs."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from pallas_kernels.ahead.topology import tpu_mesh
from pallas_kernels.survival import tpu


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledShape:
    """One call."""

    lanes: int
    drafts: int

    def arguments(self) -> tuple:
        """Of one call."""
        ints, number = jnp.zeros((self.lanes,), jnp.int32), jnp.int32(0)
        survival = jnp.zeros((self.lanes, self.drafts))
        return survival, ints, ints, number, number, number, jnp.float32(0)

    def case(self, generation: str) -> tuple[Mesh, Callable, tuple, tuple[int, ...]]:
        """Mesh, function, abstract arguments and donated ones, for `ahead.topology.compile_for`."""
        return tpu_mesh(generation), tpu.allot, jax.eval_shape(self.arguments), ()


COMPILED: dict[str, CompiledShape] = {
    "16 chains": CompiledShape(lanes=16, drafts=7),
    "128 trees": CompiledShape(lanes=128, drafts=63),
}
