"""The kernel of attention for NVIDIA GPUs from sm90 on: one warpgroup per lane, KV head and tile of 64 rows.

A step takes 64 keys: first the lane's in-flight ones, then its context, page by page. The tensor memory accelerator
copies the next step's keys and values while this step's are multiplied.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a product of a warpgroup
KEYS = 64  # of a step: one swizzled line of 128 bytes of bfloat16
SLOTS = 2  # steps whose keys and values are on the chip

_LOG2_E = math.log2(math.e)


def attention_kernel(
    span: Any,
    table: Any,
    q: Any,
    k_new: Any,
    v_new: Any,
    k_pool: Any,
    v_pool: Any,
    first_visible: Any,
    seen: Any,
    maximum: Any,
    out: Any,
    logsumexp: Any,
    q_here: Any,
    k_here: Any,
    v_here: Any,
    weights_here: Any,
    logsumexp_here: Any,
    q_arrived: Any,
    k_arrived: Any,
    v_arrived: Any,
    *,
    kv_heads: int,
    page_size: int,
    scale: float,
    softcap: float | None,
    with_sinks: bool,
) -> None:
    """See `pallas_kernels.attention.gpu.attend` for the arrays; what ends in `here` is in shared memory."""
    lane, head, tile = (jax.lax.axis_index(name) for name in ("lane", "head", "tile"))
    lowest, context, in_flight = span[lane, tile, 0], span[lane, tile, 1], span[lane, tile, 2]
    first_block = jax.lax.div(lowest, KEYS)
    steps = in_flight + jnp.maximum(jax.lax.div(context + (KEYS - 1), KEYS) - first_block, 0)
    rows = pl.ds(tile * ROWS, ROWS)
    by_row = plgpu.Layout.WGMMA.reduce(1)

    def copy(step: Any) -> None:
        slot = jax.lax.rem(step, SLOTS)

        def start(k: Any, v: Any) -> None:
            plgpu.copy_gmem_to_smem(k, k_here.at[slot], k_arrived.at[slot])
            plgpu.copy_gmem_to_smem(v, v_here.at[slot], v_arrived.at[slot])

        @pl.when(step < in_flight)
        def _() -> None:
            row, keys = lane * kv_heads + head, pl.ds(step * KEYS, KEYS)
            start(k_new.at[row, :, keys], v_new.at[row, keys, :])

        @pl.when(step >= in_flight)
        def _() -> None:
            position = (step - in_flight + first_block) * KEYS
            page = table[lane, jax.lax.div(position, page_size)]
            row, keys = page * kv_heads + head, pl.ds(jax.lax.rem(position, page_size), KEYS)
            start(k_pool.at[row, :, keys], v_pool.at[row, keys, :])

    def attend_step(step: Any, carry: Any, mask_of: Any, clean: Any) -> Any:
        weighted, maximum, total = carry
        slot = jax.lax.rem(step, SLOTS)

        @pl.when(step + 1 < steps)
        def _() -> None:
            copy(step + 1)

        plgpu.barrier_wait(k_arrived.at[slot])

        def multiply_keys(sums: Any) -> Any:
            plgpu.wgmma(sums, q_here, k_here.at[slot])
            return sums[...]

        scores = pl.run_scoped(multiply_keys, plgpu.ACC((ROWS, KEYS), jnp.float32)) * scale
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(mask_of(step), scores * _LOG2_E, -jnp.inf)
        higher = jnp.maximum(maximum, scores.max(axis=1))
        decay = jnp.exp2(maximum - higher)
        weights = jnp.exp2(scores - jax.lax.broadcast_in_dim(higher, scores.shape, [0]))
        total = total * decay + weights.sum(axis=1)
        weighted = weighted * jax.lax.broadcast_in_dim(decay, weighted.shape, [0])
        # Weights in registers, and sums that start from `weighted`, would be cheaper; the interpreter has neither.
        weights_here[...] = weights.astype(weights_here.dtype)
        plgpu.barrier_wait(v_arrived.at[slot])
        clean(step, slot)
        plgpu.commit_smem()

        def multiply_values(sums: Any) -> Any:
            plgpu.wgmma(sums, weights_here, v_here.at[slot])
            return sums[...]

        added = pl.run_scoped(multiply_values, plgpu.ACC(weighted.shape, jnp.float32))
        return weighted + added, higher, total

    def row_values(ref: Any) -> Any:
        return plgpu.load(ref, layout=by_row, optimized=False)  # pyright: ignore[reportCallIssue]

    def iota(dimension: int, width: int = KEYS) -> Any:
        return plgpu.broadcasted_iota(jnp.int32, (ROWS, width), dimension, layout=plgpu.Layout.WGMMA)

    def in_flight_mask(step: Any) -> Any:
        key = iota(1)
        words = [
            jax.lax.broadcast_in_dim(row_values(seen.at[lane, step * 2 + i, rows]), (ROWS, KEYS), [0])
            for i in range(KEYS // 32)
        ]
        word = jnp.where(key < 32, words[0], words[1])
        return (jax.lax.shift_right_logical(word, key & 31) & 1) == 1

    def start_of(step: Any) -> Any:
        return (step - in_flight + first_block) * KEYS

    first = row_values(first_visible.at[lane, rows])

    def context_mask(step: Any) -> Any:
        position = iota(1) + start_of(step)
        return (position < context) & (position >= jax.lax.broadcast_in_dim(first, (ROWS, KEYS), [0]))

    def clean_context(step: Any, slot: Any) -> None:
        start = start_of(step)

        # Rows that nobody owns may hold NaN, and 0 * NaN would be NaN.
        @pl.when((start < lowest) | (start + KEYS > context))
        def _() -> None:
            position = iota(0, v_here.shape[-1]) + start
            held = (position >= lowest) & (position < context)
            values = v_here[slot]
            v_here[slot] = jnp.where(held, values, jnp.zeros_like(values))

    plgpu.copy_gmem_to_smem(q.at[lane * kv_heads + head, rows, :], q_here, q_arrived)

    @pl.when(steps > 0)
    def _() -> None:
        copy(jnp.int32(0))

    plgpu.barrier_wait(q_arrived)
    value_size = v_here.shape[-1]
    carry = (
        plgpu.layout_cast(jnp.zeros((ROWS, value_size), jnp.float32), plgpu.Layout.WGMMA),
        row_values(maximum.at[head, rows]),
        plgpu.layout_cast(jnp.full((ROWS,), 1.0 if with_sinks else 0.0, jnp.float32), by_row),
    )
    carry = jax.lax.fori_loop(
        0, in_flight, lambda s, c: attend_step(s, c, in_flight_mask, lambda step, slot: None), carry
    )
    weighted, maximum, total = jax.lax.fori_loop(
        in_flight, steps, lambda s, c: attend_step(s, c, context_mask, clean_context), carry
    )
    nothing = total == 0
    safe = jnp.where(nothing, 1.0, total)
    q_here[...] = (weighted / jax.lax.broadcast_in_dim(safe, weighted.shape, [0])).astype(q_here.dtype)
    logsumexp_here[...] = jnp.where(nothing, -jnp.inf, (maximum + jnp.log2(safe)) / _LOG2_E)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(q_here, out.at[lane * kv_heads + head, rows, :])
    plgpu.copy_smem_to_gmem(logsumexp_here, logsumexp.at[lane * kv_heads + head, rows])
    plgpu.wait_smem_to_gmem(0)
