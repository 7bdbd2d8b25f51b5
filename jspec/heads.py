"""Attention and commit on a mesh: every device has some KV heads, their pages, and the queries that read them.

The mesh is the one in use (`jax.set_mesh`); without one, or where it does not divide the KV heads, both run as
they are. Neither needs a collective.
"""

from typing import Any

import jax
from jax.sharding import AbstractMesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jspec.sharding import MESH_AXES
from pallas_kernels.attention.api import attend as attend_here
from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight
from pallas_kernels.commit.api import commit_rows as commit_here

_AXIS = MESH_AXES["kv_heads"]
_WHOLE = PartitionSpec()
_ROWS = PartitionSpec(None, _AXIS)  # [rows, heads, size]
_LAYERS = PartitionSpec(None, None, _AXIS)  # pools, and rows of all layers


def attend(
    q: Float[Array, "queries heads head_size"],
    k_new: Float[Array, "keys kv_heads head_size"],
    v_new: Float[Array, "keys kv_heads value_size"],
    pages: Pages,
    layer: int,
    sight: Sight,
    *,
    scale: float,
    softcap: float | None = None,
) -> Float[Array, "queries heads value_size"]:
    """See `pallas_kernels.attention.api.attend`."""

    def run(q: Array, k_new: Array, v_new: Array, pages: Pages, sight: Sight) -> Any:
        return attend_here(q, k_new, v_new, pages, layer, sight, scale=scale, softcap=softcap)

    mesh = _mesh(k_new.shape[1])
    if mesh is not None:
        specs = (_ROWS, _ROWS, _ROWS, _LAYERS, _WHOLE)
        # Kernels do not say over which axes their results vary.
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=_ROWS, check_vma=False)
    return run(q, k_new, v_new, pages, sight)


def commit_rows(
    pages: Pages,
    k_new: Float[Array, "layers nodes kv_heads head_size"],
    v_new: Float[Array, "layers nodes kv_heads head_size"],
    path: Int[Array, "lanes commits"],
    page_table: Int[Array, "lanes columns"],
    lengths: Int[Array, "lanes"],
) -> Pages:
    """See `pallas_kernels.commit.api.commit_rows`."""
    run = commit_here
    mesh = _mesh(k_new.shape[2])
    if mesh is not None:
        specs = (_LAYERS, _LAYERS, _LAYERS, _WHOLE, _WHOLE, _WHOLE)
        run = jax.shard_map(run, mesh=mesh, in_specs=specs, out_specs=_LAYERS, check_vma=False)
    return run(pages, k_new, v_new, path, page_table, lengths)


def _mesh(kv_heads: int) -> AbstractMesh | None:
    mesh = jax.sharding.get_abstract_mesh()
    parts = mesh.shape.get(_AXIS, 1)
    return mesh if parts > 1 and kv_heads % parts == 0 else None
