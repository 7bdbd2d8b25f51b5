"""Committing in plain XLA, entry by entry: right everywhere, and in place on a CPU."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from pallas_kernels.attention.pages import Pages


def commit_rows(
    pages: Pages,
    k_new: Float[Array, "layers nodes kv_heads head_size"],
    v_new: Float[Array, "layers nodes kv_heads head_size"],
    path: Int[Array, "lanes commits"],
    page_table: Int[Array, "lanes columns"],
    lengths: Int[Array, "lanes"],
) -> Pages:
    """See `pallas_kernels.commit.api.commit_rows`."""
    k_new, v_new = _stored(k_new, pages), _stored(v_new, pages)
    commits = path.shape[1]
    nodes = path.reshape(-1)
    order = jnp.argsort(nodes < 0, stable=True)

    def write(i: jax.Array, pools: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        entry = order[i]
        lane = entry // commits
        position = lengths[lane] + entry % commits
        page = page_table[lane, position // pages.page_size]
        row = position % pages.page_size
        k_row = jax.lax.dynamic_slice_in_dim(k_new, nodes[entry], 1, axis=1)[..., None]
        v_row = jax.lax.dynamic_slice_in_dim(v_new, nodes[entry], 1, axis=1)
        k_pool = jax.lax.dynamic_update_slice(pools[0], k_row, (0, page, 0, 0, row))
        if pages.values_by_feature:
            v_pool = jax.lax.dynamic_update_slice(pools[1], v_row[..., None], (0, page, 0, 0, row))
        else:
            v_pool = jax.lax.dynamic_update_slice(pools[1], v_row[..., None, :], (0, page, 0, row, 0))
        return k_pool, v_pool

    pools = jax.lax.fori_loop(0, jnp.sum(nodes >= 0), write, (pages.stored_k, pages.stored_v))
    return dataclasses.replace(pages, stored_k=pools[0], stored_v=pools[1])


def _stored(rows: Float[Array, "*shape"], pages: Pages) -> Shaped[Array, "*shape"]:
    rows = rows.astype(pages.dtype)
    if pages.stored_k.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(rows, jnp.uint16)
    return rows
