"""Compiles the programs of a planned engine, in a process of its own: libtpu ends one where it cannot go on.

`python -m jspec.planning.child REQUEST` prints lines of JSON: first the engine's `Resident`, then, of every
program, its round, kind and facts. REQUEST is a `Request` as JSON.
"""

import dataclasses
import json
import math
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh

from jspec.buckets import Bucket
from jspec.drafters.tree_shape import parse_tree
from jspec.planning.configs import planned_drafter, planned_target
from jspec.planning.facts import Chip, Request, Resident, RoundProgram
from jspec.planning.rounds import KINDS, DescribedEngine
from pallas_kernels.ahead.program import facts
from pallas_kernels.ahead.topology import compile_for, tpu_mesh


def chip_of(mesh: Mesh) -> Chip:
    """What one device of a described mesh has, as JAX's table of TPUs says."""
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        info = pltpu.get_tpu_info()
    device = mesh.devices.flat[0]
    cores = device.num_cores
    return Chip(
        kind=device.device_kind,
        memory_bytes=info.hbm_capacity_bytes * cores,
        bytes_per_second=info.mem_bw_bytes_per_second * cores,
        flops_per_second=info.bf16_ops_per_second * cores,
    )


def device_bytes(arrays: Any) -> int:
    """Bytes of described arrays on one device."""
    return sum(
        math.prod(leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape))
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(arrays)
    )


def main(request: str) -> None:
    """See the module."""
    wanted = Request(**json.loads(request))
    mesh = tpu_mesh(wanted.topology, (1, wanted.tensor), ("data", "tensor"))
    dtype = jnp.dtype(wanted.dtype)
    target = planned_target(wanted.target, mesh)
    tree = None if wanted.tree is None else parse_tree(wanted.tree)
    drafter = planned_drafter(
        wanted.drafter, target, mesh, dtype, draft_length=wanted.draft_length, tree=tree
    )
    engine = DescribedEngine(
        target=target,
        drafter=drafter,
        mesh=mesh,
        dtype=dtype,
        max_slots=wanted.slots,
        max_context=wanted.context,
        page_size=wanted.page_size,
    )
    models = engine.models()
    state = engine.state(models)
    drafter_pages = [leaf for leaf in jax.tree.leaves(state.drafter) if leaf.ndim == 5]
    pools = [group.pages for group in state.cache.groups]
    resident = Resident(
        chip=chip_of(mesh),
        target_bytes=device_bytes(models.target),
        drafter_bytes=device_bytes(models.drafter),
        pool_bytes=device_bytes(pools),
        drafter_pool_bytes=device_bytes(drafter_pages),
        other_bytes=device_bytes(state) - device_bytes(pools) - device_bytes(drafter_pages),
        draft_length=drafter.drafter.draft_length,
        draft_depth=drafter.drafter.draft_depth,
        target_identity=target.identity,
    )
    print(json.dumps(dataclasses.asdict(resident)), flush=True)
    for name, bucket in buckets_of(wanted, resident.draft_length).items():
        for kind in KINDS:
            if kind == "propose" and not bucket.budget:
                continue  # nothing is drafted: it packs the nodes
            function, arguments, donated = engine.program(kind, bucket)
            compiled = compile_for(mesh, function, arguments, donated=donated)
            program = RoundProgram(
                **dataclasses.asdict(facts(compiled)),
                embedding_bytes=device_bytes(engine.embeddings_of(compiled, arguments)),
            )
            print(
                json.dumps({"round": name, "kind": kind, "program": dataclasses.asdict(program)}), flush=True
            )


def buckets_of(request: Request, draft_length: int) -> dict[str, Bucket]:
    """The rounds that a plan compares: with drafts, without, and a prompt's chunk."""
    lanes = request.lanes
    rounds = {
        "plain": Bucket(lanes=lanes, nodes=lanes, chunk=0),
        "prefill": Bucket(lanes=1, nodes=1, chunk=request.chunk),
    }
    if draft_length:
        rounds = {"speculative": Bucket(lanes=lanes, nodes=lanes * (1 + draft_length), chunk=0), **rounds}
    return rounds


if __name__ == "__main__":
    main(sys.argv[1])
