"""A training step that is compiled for TPUs and never run: memory, collectives, bounds of time.

`python -m jspec_train.plan_step REQUEST` is the process that compiles; it prints one line of JSON.
"""

import dataclasses
import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.objectives.batch import TrainBatch
from jspec.objectives.dflash import DFlashObjective
from jspec.objectives.frozen import FrozenTarget
from jspec.planning.child import chip_of, device_bytes
from jspec.planning.configs import planned_dflash, planned_target
from jspec.planning.facts import Chip, run_child
from jspec.planning.rounds import Described, described
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves, decoder_units
from jspec_train.optimizer import adamw, learning_rate_schedule
from jspec_train.step import Trainer
from pallas_kernels.ahead.program import Program, facts
from pallas_kernels.ahead.topology import compile_for, tpu_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRequest:
    """Which update, on which devices."""

    target: str  # config.json, or a folder with one
    drafter: str  # the same, of a DFlash or DFlash 2 drafter
    topology: str
    data: int  # devices that have rows of their own
    tensor: int  # devices that share the target's vocabulary
    rows: int  # of a batch, over all devices
    tokens: int  # of a row
    num_anchors: int
    dtype: str

    def __post_init__(self) -> None:
        if self.rows % self.data:
            raise ValueError(f"rows: expected a multiple of {self.data} devices, got {self.rows}; round it")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompiledStep:
    """What the compiler says of it; bytes of one device."""

    chip: Chip
    state_bytes: int  # masters and moments
    target_bytes: int
    batch_bytes: int  # features included
    program: Program


def compile_step(request: StepRequest, *, timeout: float = 1800.0) -> CompiledStep:
    """Compiles an update for TPUs that need not be there.

    Raises:
      jspec.planning.facts.PlanFailed: libtpu is missing or refuses it, or the drafter cannot be trained so.
    """
    (line,) = run_child("jspec_train.plan_step", json.dumps(dataclasses.asdict(request)), timeout=timeout)
    return CompiledStep(**{**line, "chip": Chip(**line["chip"]), "program": Program(**line["program"])})


def described_step(
    target: DecoderConfig,
    drafter: DFlashConfig,
    mesh: Mesh,
    *,
    rows: int,
    tokens: int,
    num_anchors: int,
    dtype: str = "bfloat16",
) -> Described:
    """An update of a DFlash drafter on features that are given, as shapes.

    Args:
      target: its embedding and head are split over the mesh's `tensor` axis.
      drafter: whose masters and moments are split over `data`.
      mesh: with both axes.
      rows: of a batch.
      tokens: of a row.
      num_anchors: blocks per row.
      dtype: of weights and features.
    """
    leaves = dflash_leaves(drafter, jnp.dtype(dtype))
    trainer = Trainer(
        objective=DFlashObjective(config=drafter, num_anchors=num_anchors),
        optimizer=adamw(
            learning_rate_schedule("constant", peak=1e-4, total_steps=1, warmup_steps=0), max_grad_norm=1.0
        ),
        leaves=leaves,
        mesh=mesh,
        seed=0,
    )

    given = tuple(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves)
    state = jax.eval_shape(trainer.fresh, given)
    state = jax.tree.map(_at, state, trainer.shardings(state))
    whole, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    frozen = tuple(
        _at(array, whole) for array, leaf in zip(given, leaves, strict=True) if leaf.path in trainer.frozen
    )
    params: Any = described(decoder_leaves(target, jnp.dtype(dtype)), decoder_units(target), mesh)
    width = len(drafter.target_layer_ids) * target.hidden_size

    def batch(shape: tuple[int, ...], kind: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, kind, sharding=split)

    window = [
        TrainBatch(
            ids=batch((rows, tokens), np.int32),
            loss_mask=batch((rows, tokens), np.bool_),
            segments=batch((rows, tokens), np.int32),
            positions=batch((rows, tokens), np.int32),
            features=batch((rows, tokens, width), jnp.dtype(dtype)),
        )
    ]
    tables = FrozenTarget(params=params, target=DecoderTarget(target))
    return trainer.update, (state, frozen, tables, window), (0,)


def _at(array: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def main(request: str) -> None:
    """See the module."""
    wanted = StepRequest(**json.loads(request))
    mesh = tpu_mesh(wanted.topology, (wanted.data, wanted.tensor), ("data", "tensor"))
    target = planned_target(wanted.target)
    update, arguments, donated = described_step(
        target,
        planned_dflash(wanted.drafter, target),
        mesh,
        rows=wanted.rows,
        tokens=wanted.tokens,
        num_anchors=wanted.num_anchors,
        dtype=wanted.dtype,
    )
    program = facts(compile_for(mesh, update, arguments, donated=donated))
    state, _, tables, window = arguments
    step = CompiledStep(
        chip=chip_of(mesh),
        state_bytes=device_bytes(state),
        target_bytes=device_bytes(tables),
        batch_bytes=device_bytes(window),
        program=program,
    )
    print(json.dumps(dataclasses.asdict(step)), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
