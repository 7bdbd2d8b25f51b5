"""Attention and commit on a mesh: a device has some KV heads, their pages, and the queries that read them.

The mesh is the one in use (`jax.set_mesh`); where it does not divide the KV heads, every device has all of
them. Neither needs a collective.
"""

import functools
from typing import Any

from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jspec.sharding import mesh_axis_of, on_every_device
from pallas_kernels.attention.api import attend as attend_here
from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight
from pallas_kernels.block_attention.api import attend_blocks as attend_blocks_here
from pallas_kernels.commit.api import commit_rows as commit_here

_WHOLE = PartitionSpec()


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

    axis = split_axis(pages)
    rows, pools = PartitionSpec(None, axis), PartitionSpec(None, None, axis)
    run = on_every_device(run, in_specs=(rows, rows, rows, pools, _WHOLE), out_specs=rows)
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
    layers = PartitionSpec(None, None, split_axis(pages))  # of pools, and of rows
    run = on_every_device(
        commit_here, in_specs=(layers, layers, layers, _WHOLE, _WHOLE, _WHOLE), out_specs=layers
    )
    return run(pages, k_new, v_new, path, page_table, lengths)


def attend_blocks(
    q: Float[Array, "rows blocks block heads head_size"],
    k: Float[Array, "rows blocks block kv_heads head_size"],
    v: Float[Array, "rows blocks block kv_heads value_size"],
    k_context: Float[Array, "rows tokens kv_heads head_size"],
    v_context: Float[Array, "rows tokens kv_heads value_size"],
    starts: Int[Array, "rows blocks"],
    anchors: Int[Array, "rows blocks"],
    *,
    scale: float,
    causal: bool,
    window: int | None,
) -> Float[Array, "rows blocks block heads value_size"]:
    """See `pallas_kernels.block_attention.api.attend_blocks`."""
    axis = mesh_axis_of("kv_heads", k.shape[3])
    block, context = PartitionSpec(None, None, None, axis), PartitionSpec(None, None, axis)
    run = functools.partial(attend_blocks_here, scale=scale, causal=causal, window=window)
    run = on_every_device(
        run, in_specs=(block, block, block, context, context, _WHOLE, _WHOLE), out_specs=block
    )
    return run(q, k, v, k_context, v_context, starts, anchors)


def split_axis(pages: Pages) -> str | None:
    """The mesh axis that the KV heads of these pages are split over; None = every device has all of them."""
    return None if pages.whole else mesh_axis_of("kv_heads", pages.stored_k.shape[2])
