"""Named updates that are compiled for TPUs; no weight is ever made."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.sharding import Mesh

from jspec.shapes import DFLASH_QWEN3_8B, QWEN3_8B
from jspec_train.plan_step import described_step
from pallas_kernels.ahead.topology import tpu_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledUpdate:
    """An update of the DFlash drafter of a Qwen3-8B on stored features."""

    data: int
    tensor: int
    rows: int
    tokens: int
    num_anchors: int

    def case(self, generation: str) -> tuple[Mesh, Callable[..., Any], tuple[Any, ...], tuple[int, ...]]:
        """Mesh, function, abstract arguments and donated ones, for `ahead.topology.compile_for`."""
        mesh = tpu_mesh(generation, (self.data, self.tensor), ("data", "tensor"))
        step = described_step(
            QWEN3_8B,
            DFLASH_QWEN3_8B,
            mesh,
            rows=self.rows,
            tokens=self.tokens,
            num_anchors=self.num_anchors,
        )
        return mesh, *step


COMPILED = {"dflash on 2x4": CompiledUpdate(data=2, tensor=4, rows=4, tokens=2048, num_anchors=256)}
