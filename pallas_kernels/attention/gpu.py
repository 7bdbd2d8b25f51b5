"""Attention for NVIDIA GPUs from sm90 on: how `attend` calls its Mosaic GPU kernel.

Queries and in-flight keys are few: plain XLA lays them out in tiles of lanes, and their masks as bits. The context is
read by the kernel, from the pages where it lies. All products take bfloat16 operands, the softmax weights among them,
and sum in float32.

It has not run on a GPU: the interpreter runs it, and XLA compiles it ahead of time for an H100, with the pool passed
as it lies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.gpu_kernel import KEYS, ROWS, SLOTS, attention_kernel
from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight

_LOWEST = -1e30  # below any score, yet finite
_UNSEEN = 2**30  # beyond any position


def unsupported(q: Float[Array, "queries heads head_size"], pages: Pages) -> str | None:
    """The error of a call that the kernel cannot do; None of one that it can."""
    if jax.__version_info__ < (0, 12):
        return f'implementation: expected jax 0.12 or newer for "gpu", got {jax.__version__}; use "xla"'
    if q.dtype != jnp.bfloat16 or pages.dtype != jnp.bfloat16:
        return (
            f'pages: expected q and pages in bfloat16 for implementation="gpu", got {q.dtype} and '
            f'{pages.dtype}; use "xla"'
        )
    if q.shape[2] not in (64, 128):
        return f'q: expected head size 64 or 128 for implementation="gpu", got {q.shape[2]}; use "xla"'
    if pages.page_size % KEYS or pages.values_by_feature:
        return (
            f'pages: expected a page size that is a multiple of {KEYS}, allocated for another platform than "tpu", '
            f'for implementation="gpu", got {pages.page_size}; allocate such pages, or use "xla"'
        )
    return None


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "interpret"))
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
    *,
    interpret: Any = None,
) -> tuple[Float[Array, "queries heads value_size"], Float[Array, "queries heads"]]:
    """See `pallas_kernels.attention.api.attend`; `interpret` is that of `plgpu.kernel`."""
    num_queries, heads, size = q.shape
    kv_heads = k_new.shape[1]
    lanes = sight.context_lengths.shape[0]
    group = heads // kv_heads
    most_queries = min(sight.max_queries, num_queries)
    tiles = -(-most_queries * group // ROWS)
    rows = tiles * ROWS
    lane_queries = sight.query_offsets[1:] - sight.query_offsets[:-1]
    lane_keys = sight.key_offsets[1:] - sight.key_offsets[:-1]
    context = jnp.where(lane_queries > 0, sight.context_lengths, 0)

    number = jnp.arange(most_queries, dtype=jnp.int32)
    real = number[None] < lane_queries[:, None]
    query = jnp.where(real, sight.query_offsets[:-1, None] + number[None], 0)

    def by_row(per_query: Array) -> Array:
        """[lanes, queries, ...] to [lanes, rows, ...]: every query once per head of its group."""
        spread = jnp.repeat(per_query, group, axis=1)
        return jnp.pad(spread, [(0, 0), (0, rows - spread.shape[1])] + [(0, 0)] * (spread.ndim - 2))

    tiled_q = jnp.where(real[..., None, None], q[query], 0).reshape(
        lanes, most_queries, kv_heads, group, size
    )
    tiled_q = tiled_q.transpose(0, 2, 1, 3, 4).reshape(lanes * kv_heads, most_queries * group, size)
    tiled_q = jnp.pad(tiled_q, ((0, 0), (0, rows - most_queries * group), (0, 0)))

    k_lanes, v_lanes = (_by_lane(new, sight, lane_keys) for new in (k_new, v_new))
    row_real = by_row(real)
    first_visible = jnp.where(row_real, by_row(sight.first_visible[query]), _UNSEEN)
    lowest = jnp.minimum(first_visible.reshape(lanes, tiles, ROWS).min(axis=2), context[:, None])
    busy = row_real.reshape(lanes, tiles, ROWS).any(axis=2)
    in_flight = jnp.where(busy, -(-lane_keys[:, None] // KEYS), 0)
    span = jnp.stack(
        [jnp.maximum(lowest, 0), jnp.broadcast_to(context[:, None], lowest.shape), in_flight], axis=2
    )
    seen = _seen_bits(sight, query, real, lane_queries, lane_keys, context, k_lanes.shape[2])
    spread_sinks = jnp.full((kv_heads, group), _LOWEST) if sinks is None else sinks.reshape(kv_heads, group)
    maximum = jnp.tile(spread_sinks.astype(jnp.float32) * jnp.log2(jnp.e), (1, -(-rows // group)))[:, :rows]

    pool = pages.stored_k.shape
    k_pool, v_pool = (
        jax.lax.bitcast_convert_type(stored, jnp.bfloat16).reshape(-1, *stored.shape[3:])
        for stored in (pages.stored_k, pages.stored_v)
    )
    transforms = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    out, logsumexp = plgpu.kernel(
        functools.partial(
            attention_kernel,
            kv_heads=kv_heads,
            page_size=pages.page_size,
            scale=scale,
            softcap=softcap,
            with_sinks=sinks is not None,
        ),
        out_type=(
            jax.ShapeDtypeStruct((lanes * kv_heads, rows, size), q.dtype),
            jax.ShapeDtypeStruct((lanes * kv_heads, rows), jnp.float32),
        ),
        scratch_types=(
            plgpu.SMEM((ROWS, size), q.dtype, transforms=transforms),
            plgpu.SMEM((SLOTS, size, KEYS), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((SLOTS, KEYS, size), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((ROWS, KEYS), jnp.bfloat16, transforms=transforms),
            plgpu.SMEM((ROWS,), jnp.float32),
            plgpu.Barrier(),
            plgpu.Barrier(num_barriers=SLOTS),
            plgpu.Barrier(num_barriers=SLOTS),
        ),
        grid=(tiles, kv_heads, lanes),
        grid_names=("tile", "head", "lane"),
        interpret=interpret,
    )(
        span.astype(jnp.int32),
        jnp.asarray(layer, jnp.int32) * pool[1] + sight.page_table,
        tiled_q,
        k_lanes.transpose(0, 1, 3, 2).reshape(lanes * kv_heads, size, -1),
        v_lanes.reshape(lanes * kv_heads, -1, size),
        k_pool,
        v_pool,
        first_visible,
        by_row(seen).transpose(0, 2, 1),
        maximum,
    )
    return _packed(out, logsumexp, sight, num_queries, kv_heads, group)


def _by_lane(new: Array, sight: Sight, lane_keys: Array) -> Array:
    """In-flight keys or values, [lanes, kv_heads, keys, size], 0 past each lane's own."""
    width = max(KEYS, -(-min(sight.max_keys, new.shape[0]) // KEYS) * KEYS)
    lanes = lane_keys.shape[0]
    if new.shape[0] == 0:
        return jnp.zeros((lanes, new.shape[1], width, new.shape[2]), jnp.bfloat16)
    number = jnp.arange(width, dtype=jnp.int32)
    own = number[None] < lane_keys[:, None]
    key = jnp.where(own, sight.key_offsets[:-1, None] + number[None], 0)
    return jnp.where(own[..., None, None], new[key], 0).astype(jnp.bfloat16).swapaxes(1, 2)


def _seen_bits(
    sight: Sight, query: Array, real: Array, lane_queries: Array, lane_keys: Array, context: Array, width: int
) -> Array:
    """Which in-flight keys each query sees, as in `Sight.visible` but for causal lanes too: [lanes, queries, words]."""
    lanes, queries = query.shape
    key = jnp.arange(width, dtype=jnp.int32)[None, None]
    number = jnp.arange(queries, dtype=jnp.int32)
    last = number[None] + (lane_keys - lane_queries)[:, None]
    causal = (key <= last[..., None]) & (
        context[:, None, None] + key >= sight.first_visible[query][..., None]
    )
    exists = real[..., None] & (key < lane_keys[:, None, None])
    bit = jnp.left_shift(jnp.int32(1), key % 32)

    def packed(mask: Array) -> Array:
        return jnp.sum(
            jnp.where(mask, bit, 0).reshape(lanes, queries, width // 32, 32), axis=3, dtype=jnp.int32
        )

    words = packed(causal & exists)
    if not sight.visible.shape[1]:
        return words
    visible = sight.visible[:, : width // 32]
    visible = jnp.pad(visible, ((0, 0), (0, width // 32 - visible.shape[1])))[query]
    return jnp.where(sight.causal[:, None, None], words, visible & packed(exists))


def _packed(
    out: Array, logsumexp: Array, sight: Sight, num_queries: int, kv_heads: int, group: int
) -> tuple[Array, Array]:
    """From tiles of lanes to packed queries; padding is 0 and -inf."""
    lanes = sight.context_lengths.shape[0]
    query = jnp.arange(num_queries, dtype=jnp.int32)
    lane = jnp.sum(query[:, None] >= sight.query_offsets[None, 1:], axis=1, dtype=jnp.int32)
    real = lane < lanes
    lane = jnp.minimum(lane, lanes - 1)
    row = jnp.where(real, query - sight.query_offsets[lane], 0)[:, None] * group + jnp.arange(group)[None]

    def gathered(tiled: Array) -> Array:
        split = tiled.reshape(lanes, kv_heads, *tiled.shape[1:])
        picked = split[lane[:, None, None], jnp.arange(kv_heads)[None, :, None], row[:, None, :]]
        return picked.reshape(num_queries, kv_heads * group, *tiled.shape[2:])

    return (
        jnp.where(real[:, None, None], gathered(out), 0),
        jnp.where(real[:, None], gathered(logsumexp), -jnp.inf),
    )
