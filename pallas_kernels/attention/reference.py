"""Attention in plain XLA: right everywhere, and written to be fast on a CPU.

Lanes are taken one after the other and each one's context page by page, with the running maximum
and sum of an online softmax, so work and memory follow the real lengths.

Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867); tiling, Dao (arXiv 2307.08691).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight
from pallas_kernels.pytree import pytree

_LOWEST = -1e30  # below any score, and finite, so that exp(-inf - _LOWEST) is 0 where nothing was seen


@pytree
class Running:
    """Softmax over what was seen so far: out = weighted / total, logsumexp = maximum + log(total)."""

    maximum: Float[Array, "kv_heads rows"]
    total: Float[Array, "kv_heads rows"]
    weighted: Float[Array, "kv_heads rows value_size"]


def attend(
    q: Float[Array, "queries heads head_size"],
    k_new: Float[Array, "keys kv_heads head_size"],
    v_new: Float[Array, "keys kv_heads value_size"],
    pages: Pages,
    layer: int | Int[Array, ""],
    sight: Sight,
    scale: float,
    softcap: float | None,
    sinks: Float[Array, "heads"] | None,
) -> tuple[Float[Array, "queries heads value_size"], Float[Array, "queries heads"]]:
    """See `pallas_kernels.attention.api.attend`; returns the output and the log-sum-exp."""
    num_queries, heads, _ = q.shape
    kv_heads, value_size = v_new.shape[1:]
    group = heads // kv_heads
    max_queries = min(sight.max_queries, num_queries)
    max_keys = min(sight.max_keys, k_new.shape[0])
    page_size = pages.page_size
    rows = max_queries * group

    def cap(scores: jax.Array) -> jax.Array:
        return scores if softcap is None else softcap * jnp.tanh(scores / softcap)

    def per_row(per_query: jax.Array) -> jax.Array:
        """[queries, ...] to [queries * group, ...]: the rows of one kv head."""
        return jnp.repeat(per_query, group, axis=0)

    def lane(l: int | jax.Array, results: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        first_query, first_key = sight.query_offsets[l], sight.key_offsets[l]
        query_count = sight.query_offsets[l + 1] - first_query
        key_count = sight.key_offsets[l + 1] - first_key
        context_length = sight.context_lengths[l]
        # A window that would stick out at the end starts earlier instead.
        query_start = jnp.minimum(first_query, num_queries - max_queries)
        key_start = jnp.minimum(first_key, k_new.shape[0] - max_keys)
        query = query_start + jnp.arange(max_queries) - first_query
        key = key_start + jnp.arange(max_keys) - first_key
        real = (query >= 0) & (query < query_count)
        real_key = (key >= 0) & (key < key_count)

        def queries_of(array: jax.Array) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(array, query_start, max_queries)

        first_visible = queries_of(sight.first_visible)
        q_lane = queries_of(q).astype(jnp.float32) * scale
        q_lane = q_lane.reshape(max_queries, kv_heads, group, -1).swapaxes(0, 1).reshape(kv_heads, rows, -1)

        def add(running: Running, k: jax.Array, v: jax.Array, mask: jax.Array) -> Running:
            """Takes in a block: k [kv_heads, head_size, block], v [kv_heads, block, value_size], mask [rows, block]."""
            scores = cap(jnp.einsum("krd,kdb->krb", q_lane, k.astype(jnp.float32)))
            scores = jnp.where(mask[None], scores, -jnp.inf)
            maximum = jnp.maximum(running.maximum, jnp.max(scores, axis=-1))
            weights = jnp.exp(scores - maximum[..., None])
            decay = jnp.exp(running.maximum - maximum)
            v = jnp.where(jnp.any(mask, axis=0)[None, :, None], v.astype(jnp.float32), 0)
            return Running(
                maximum=maximum,
                total=running.total * decay + jnp.sum(weights, axis=-1),
                weighted=running.weighted * decay[..., None] + jnp.einsum("krb,kbd->krd", weights, v),
            )

        if sinks is None:
            maximum, total = jnp.full((kv_heads, rows), _LOWEST), jnp.zeros((kv_heads, rows))
        else:
            per_head = sinks.astype(jnp.float32).reshape(kv_heads, 1, group)
            maximum = jnp.broadcast_to(per_head, (kv_heads, max_queries, group)).reshape(kv_heads, rows)
            total = jnp.ones((kv_heads, rows))
        running = Running(maximum=maximum, total=total, weighted=jnp.zeros((kv_heads, rows, value_size)))

        earlier = (key[None] <= query[:, None] + (key_count - query_count)) & (
            context_length + key[None] >= first_visible[:, None]
        )
        if sight.visible.shape[1]:
            safe_key = jnp.clip(key, 0, sight.visible.shape[1] * 32 - 1)
            words = queries_of(sight.visible)[:, safe_key // 32]
            named = (jax.lax.shift_right_logical(words, (safe_key % 32)[None]) & 1) == 1
            in_flight = jnp.where(sight.causal[l], earlier, named)
        else:
            in_flight = earlier & sight.causal[l]
        in_flight &= real[:, None] & real_key[None]
        k = jax.lax.dynamic_slice_in_dim(k_new, key_start, max_keys)
        v = jax.lax.dynamic_slice_in_dim(v_new, key_start, max_keys)
        running = add(running, jnp.transpose(k, (1, 2, 0)), v.swapaxes(0, 1), per_row(in_flight))

        def page(column: jax.Array, running: Running) -> Running:
            index = (layer, sight.page_table[l, column], 0, 0, 0)
            k = jax.lax.dynamic_slice(pages.k, index, (1, 1, *pages.k.shape[2:]))[0, 0]
            v = jax.lax.dynamic_slice(pages.v, index, (1, 1, *pages.v.shape[2:]))[0, 0]
            position = column * page_size + jnp.arange(page_size)
            mask = (position[None] >= first_visible[:, None]) & (position[None] < context_length)
            return add(running, k, v, per_row(mask & real[:, None]))

        lowest = jnp.min(jnp.where(real, first_visible, context_length))
        columns = (jnp.maximum(lowest, 0) // page_size, (context_length + page_size - 1) // page_size)
        running = jax.lax.fori_loop(*columns, page, running)

        seen = (running.total > 0) & jnp.tile(jnp.repeat(real, group)[None], (kv_heads, 1))
        total = jnp.where(seen, running.total, 1)
        out = jnp.where(seen[..., None], running.weighted / total[..., None], 0)
        logsumexp = jnp.where(seen, running.maximum + jnp.log(total), -jnp.inf)

        def per_query(rows_first: jax.Array) -> jax.Array:
            split = rows_first.reshape(kv_heads, max_queries, group, *rows_first.shape[2:])
            return split.swapaxes(0, 1).reshape(max_queries, heads, *rows_first.shape[2:])

        def put(result: jax.Array, new: jax.Array) -> jax.Array:
            mine = real.reshape(-1, *(1 for _ in new.shape[1:]))
            kept = jnp.where(mine, new.astype(result.dtype), queries_of(result))
            return jax.lax.dynamic_update_slice_in_dim(result, kept, query_start, axis=0)

        return put(results[0], per_query(out)), put(results[1], per_query(logsumexp))

    results = jnp.zeros((num_queries, heads, value_size), q.dtype), jnp.full((num_queries, heads), -jnp.inf)
    lanes = sight.context_lengths.shape[0]
    return lane(0, results) if lanes == 1 else jax.lax.fori_loop(0, lanes, lane, results)
