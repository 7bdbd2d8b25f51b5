"""Attention in plain XLA: right everywhere, and written to be fast on a CPU.

Lanes are taken one after the other, in tiles of queries, and a lane's keys block by block, with the running maximum
and sum of an online softmax, so that work and memory follow the real lengths.

Source: online softmax, Milakov and Gimelshein (arXiv 1805.02867); its tiling, Dao (arXiv 2307.08691).
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.attention.pages import Pages, read_page
from pallas_kernels.attention.sight import Sight
from pallas_kernels.pytree import pytree

Results = tuple[jax.Array, jax.Array]  # output and log-sum-exp of all queries

_LOWEST = -1e30  # below any score, yet finite: exp(-inf - _LOWEST) is 0 where exp(-inf + inf) is NaN
_KEY_BLOCK = 256  # in-flight keys taken at once; whole words of `visible`


@pytree
class Tile:
    """Some queries of one lane. Row i * group + g of a kv head is query i of its g-th query head."""

    q: Float[Array, "kv_heads rows head_size"]  # float32, scaled
    number: Int[Array, "queries"]  # within the lane
    real: Bool[Array, "queries"]  # False on padding
    first_visible: Int[Array, "queries"]
    visible: Int[Array, "queries words"]
    causal: Bool[Array, ""]


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
    num_keys, kv_heads, value_size = v_new.shape
    lanes = sight.context_lengths.shape[0]
    max_keys = min(sight.max_keys, num_keys)
    # One lane is one tile; several are at most 2 * lanes of them, however uneven they are.
    tile_queries = min(sight.max_queries, -(-num_queries // lanes))
    # Rows are read and written as windows of full width, which needs room at the end.
    spare_queries = 0 if lanes == 1 else tile_queries
    spare_keys = _rounded_up(max_keys) - (num_keys if lanes == 1 else 0)
    scaled = _pad_rows(q.astype(jnp.float32) * scale, spare_queries)
    first_visible, visible = (_pad_rows(a, spare_queries) for a in (sight.first_visible, sight.visible))
    k_new, v_new = _pad_rows(k_new, spare_keys), _pad_rows(v_new, spare_keys)

    def attend_tile(l: int | jax.Array, i: int | jax.Array, results: Results) -> Results:
        first_key = 0 if lanes == 1 else sight.key_offsets[l]
        first_query = 0 if lanes == 1 else sight.query_offsets[l] + i * tile_queries
        num_queries = sight.query_offsets[l + 1] - sight.query_offsets[l]
        num_keys = sight.key_offsets[l + 1] - sight.key_offsets[l]
        context_length = jnp.where(num_queries > 0, sight.context_lengths[l], 0)
        number = i * tile_queries + jnp.arange(tile_queries)
        tile = Tile(
            q=_by_kv_head(_rows(scaled, first_query, tile_queries), kv_heads),
            number=number,
            real=number < num_queries,
            first_visible=_rows(first_visible, first_query, tile_queries),
            visible=_rows(visible, first_query, tile_queries),
            causal=sight.causal[l],
        )
        running = _start(tile, value_size, sinks)

        def add_in_flight(block: int | jax.Array, running: Running) -> Running:
            width = min(max_keys, _KEY_BLOCK)
            key = block * width + jnp.arange(width)
            mask = _sees_in_flight(tile, key, num_keys, num_queries, context_length)
            k = _rows(k_new, first_key + block * width, width).transpose(1, 2, 0)
            v = _rows(v_new, first_key + block * width, width).swapaxes(0, 1)
            return _add(running, tile, k, v, mask, key < num_keys, softcap)

        if 0 < max_keys <= _KEY_BLOCK:
            running = add_in_flight(0, running)
        elif max_keys:
            running = jax.lax.fori_loop(0, -(-num_keys // _KEY_BLOCK), add_in_flight, running)

        lowest = jnp.min(jnp.where(tile.real, tile.first_visible, context_length))

        def add_page(column: jax.Array, running: Running) -> Running:
            k, v = read_page(pages, layer, sight.page_table[l, column])
            position = column * pages.page_size + jnp.arange(pages.page_size)
            held = (position >= lowest) & (position < context_length)
            mask = held[None] & (position[None] >= tile.first_visible[:, None])
            return _add(running, tile, k, v, mask, held, softcap)

        columns = lowest // pages.page_size, -(-context_length // pages.page_size)
        running = jax.lax.fori_loop(*columns, add_page, running)

        def put(result: jax.Array, per_row: jax.Array) -> jax.Array:
            # Rows past the lane's own are 0 here; the lane that owns them comes later.
            new = _by_query(per_row, heads).astype(result.dtype)
            return jax.lax.dynamic_update_slice_in_dim(result, new, first_query, axis=0)

        out, logsumexp = _finish(running, tile)
        return put(results[0], out), put(results[1], logsumexp)

    def attend_lane(l: jax.Array, results: Results) -> Results:
        tiles = -(-(sight.query_offsets[l + 1] - sight.query_offsets[l]) // tile_queries)
        return jax.lax.fori_loop(0, tiles, functools.partial(attend_tile, l), results)

    rows = num_queries + spare_queries
    results = jnp.zeros((rows, heads, value_size), q.dtype), jnp.full((rows, heads), -jnp.inf)
    if lanes == 1:
        return attend_tile(0, 0, results)
    out, logsumexp = jax.lax.fori_loop(0, lanes, attend_lane, results)
    return out[:num_queries], logsumexp[:num_queries]


def _rounded_up(keys: int) -> int:
    return keys if keys <= _KEY_BLOCK else -(-keys // _KEY_BLOCK) * _KEY_BLOCK


def _pad_rows(array: jax.Array, spare: int) -> jax.Array:
    return jnp.pad(array, [(0, spare)] + [(0, 0)] * (array.ndim - 1)) if spare > 0 else array


def _rows(array: jax.Array, first: int | jax.Array, count: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(array, first, count)


def _by_kv_head(per_query: jax.Array, kv_heads: int) -> jax.Array:
    """[queries, heads, size] to [kv_heads, queries * group, size]."""
    queries, _, size = per_query.shape
    return per_query.reshape(queries, kv_heads, -1, size).swapaxes(0, 1).reshape(kv_heads, -1, size)


def _by_query(per_row: jax.Array, heads: int) -> jax.Array:
    """[kv_heads, queries * group, ...] to [queries, heads, ...]."""
    kv_heads, _, *rest = per_row.shape
    split = per_row.reshape(kv_heads, -1, heads // kv_heads, *rest)
    return split.swapaxes(0, 1).reshape(-1, heads, *rest)


def _start(tile: Tile, value_size: int, sinks: jax.Array | None) -> Running:
    kv_heads, rows, _ = tile.q.shape
    if sinks is None:
        maximum, total = jnp.full((kv_heads, rows), _LOWEST), jnp.zeros((kv_heads, rows))
    else:
        # A key with the sink's logit and no value, seen before all others.
        maximum = jnp.tile(sinks.astype(jnp.float32).reshape(kv_heads, -1), (1, tile.real.shape[0]))
        total = jnp.ones((kv_heads, rows))
    return Running(maximum=maximum, total=total, weighted=jnp.zeros((kv_heads, rows, value_size)))


def _sees_in_flight(
    tile: Tile,
    key: jax.Array,
    num_keys: jax.Array,
    num_queries: jax.Array,
    context_length: jax.Array,
) -> jax.Array:
    """[queries, block] mask of the lane's in-flight keys number key[0], key[0] + 1, ..."""
    position = context_length + key
    seen = key[None] <= tile.number[:, None] + (num_keys - num_queries)
    seen &= position[None] >= tile.first_visible[:, None]
    seen &= tile.causal
    if tile.visible.shape[1]:
        words = jnp.take(tile.visible, key // 32, axis=1, mode="clip")
        seen |= ~tile.causal & ((jax.lax.shift_right_logical(words, key[None] % 32) & 1) == 1)
    return seen & (key < num_keys)[None]


def _add(
    running: Running,
    tile: Tile,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    held: jax.Array,
    softcap: float | None,
) -> Running:
    """Takes in a block: k [kv_heads, head_size, block], v [kv_heads, block, value_size].

    `mask` [queries, block] says who sees what; where `held` [block] is False, k and v may be NaN.
    """
    scores = jnp.einsum("krd,kdb->krb", tile.q, k.astype(jnp.float32), precision="highest")
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    group = scores.shape[1] // mask.shape[0]
    scores = jnp.where(jnp.repeat(mask, group, axis=0)[None], scores, -jnp.inf)
    maximum = jnp.maximum(running.maximum, _row_maximum(scores))
    weights = jnp.exp(scores - maximum[..., None])
    decay = jnp.exp(running.maximum - maximum)
    v = jnp.where(held[None, :, None], v.astype(jnp.float32), 0)  # 0 * NaN would be NaN
    added = jnp.einsum("krb,kbd->krd", weights, v, precision="highest")
    return Running(
        maximum=maximum,
        total=running.total * decay + jnp.sum(weights, axis=-1),
        weighted=running.weighted * decay[..., None] + added,
    )


def _row_maximum(scores: jax.Array) -> jax.Array:
    # XLA's CPU code takes a maximum along the innermost axis one by one; folding it is vectorised.
    while scores.shape[-1] > 32 and scores.shape[-1] % 2 == 0:
        scores = jnp.maximum(*jnp.split(scores, 2, axis=-1))
    return jnp.max(scores, axis=-1)


def _finish(running: Running, tile: Tile) -> tuple[jax.Array, jax.Array]:
    """Output [kv_heads, rows, value_size] and log-sum-exp; 0 and -inf where nothing was seen."""
    group = running.total.shape[1] // tile.real.shape[0]
    seen = (running.total != 0) & jnp.repeat(tile.real, group)[None]
    total = jnp.where(seen, running.total, 1)
    out = jnp.where(seen[..., None], running.weighted / total[..., None], 0)
    return out, jnp.where(seen, running.maximum + jnp.log(total), -jnp.inf)
