"""Compiling for TPUs that one does not have: libtpu holds their compiler and needs no device.

Nothing here runs a program; what the compiler says about it is in `program.py`. libtpu aborts the
process on some faults, so checks run in a child: `child.py`.
"""

import importlib.util
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# A topology of each generation with at least 8 devices, on which meshes of up to so many are laid.
TOPOLOGIES = {"v5e": "v5e:2x4", "v5p": "v5p:2x2x2", "v6e": "v6e:2x4", "v7x": "tpu7x:2x2x1"}


def library() -> pathlib.Path | None:
    """Where libtpu is: TPU_LIBRARY_PATH, or the installed package; None if nowhere."""
    if path := os.environ.get("TPU_LIBRARY_PATH"):
        return pathlib.Path(path)
    found = importlib.util.find_spec("libtpu")
    if found is None or not found.submodule_search_locations:
        return None
    return pathlib.Path(found.submodule_search_locations[0]) / "libtpu.so"


def library_version() -> str | None:
    """Of libtpu; instruction counts belong to one. None if there is none, or it does not say."""
    path = library()
    if path is None:
        return None
    described = sorted(path.parent.parent.glob("libtpu-*.dist-info"))
    return described[0].name.removeprefix("libtpu-").removesuffix(".dist-info") if described else None


def environment(dump: pathlib.Path | None = None) -> dict[str, str]:
    """Variables of a process that compiles ahead of time; to be set before it imports JAX.

    They keep libtpu from asking a cloud for metadata, from writing logs, and from locking out a second
    process.

    Args:
      dump: folder for the compiler's own listings, from which instructions are counted; None = none.
    """
    variables = {
        "JAX_PLATFORMS": "cpu",
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # programs for a TPU cannot be read back without one
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-4",
        "TPU_WORKER_HOSTNAMES": "localhost",
        "TPU_LOG_DIR": "disabled",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    }
    if dump is not None:
        variables["LIBTPU_INIT_ARGS"] = f"--xla_jf_dump_to={dump} --xla_jf_dump_llo_text=true"
    return variables


def tpu_mesh(generation: str, shape: Sequence[int] = (1,), axes: Sequence[str] = ("tensor",)) -> Mesh:
    """A mesh of devices that are only described.

    Args:
      generation: "v5e", "v5p", "v6e" or "v7x"; or a topology of libtpu, such as "v5e:4x4".
      shape: devices along each axis; they need not be all.
      axes: their names.

    Raises:
      ValueError: a topology that libtpu does not know, or more devices than it has.
    """
    try:
        described = topologies.get_topology_desc(
            platform="tpu", topology_name=TOPOLOGIES.get(generation, generation)
        )
    except (RuntimeError, NotImplementedError, ValueError) as problem:
        raise ValueError(
            f"topology: expected one of {', '.join(sorted(TOPOLOGIES))} or a topology such as v5e:2x4, v5p:2x2x2 or "
            f"tpu7x:2x2x1, got {generation!r} ({str(problem).partition(chr(10))[0]}); pick one of them"
        ) from problem
    count = int(np.prod(shape))
    if count > len(described.devices):
        raise ValueError(
            f"topology: expected at least {' x '.join(map(str, shape))} devices, got {generation}, which has "
            f"{len(described.devices)}; use fewer, or a larger one"
        )
    return Mesh(np.array(described.devices[:count]).reshape(shape), axes)


def compile_for(mesh: Mesh, function: Callable, arguments: tuple, *, donated: Sequence[int] = ()) -> Any:
    """Compiles `function` for a mesh.

    Args:
      mesh: from `tpu_mesh`.
      function: to be jitted.
      arguments: pytrees of arrays or of `jax.ShapeDtypeStruct`, of which only shapes, dtypes and
        shardings are read; without a sharding they are replicated.
      donated: numbers of the arguments whose memory the results may take.
    """
    replicated = NamedSharding(mesh, PartitionSpec())

    def placed(leaf: Any) -> jax.ShapeDtypeStruct:
        sharding = getattr(leaf, "sharding", None)
        own = isinstance(sharding, NamedSharding) and sharding.mesh == mesh
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding if own else replicated)

    arguments = jax.tree.map(placed, arguments)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        traced = jax.jit(function, donate_argnums=tuple(donated)).trace(*arguments)
        return traced.lower(lowering_platforms=("tpu",)).compile()
