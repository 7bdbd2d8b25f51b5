"""Attention for TPU: how `attend` calls its kernel.

Products of a bfloat16 pool with bfloat16 queries take bfloat16 operands, the softmax weights among
them, and sum in float32; all others are float32.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight
from pallas_kernels.attention.tiling import Tiling
from pallas_kernels.attention.tpu_call import Arrays, Results, Scalars, Scratch
from pallas_kernels.attention.tpu_kernel import attention_kernel
from pallas_kernels.registers import LANES, padded_bytes, split_width


@functools.partial(jax.jit, static_argnames=("scale", "softcap", "with_logsumexp", "interpret"))
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
    with_logsumexp: bool = True,
    interpret: Any = False,
) -> tuple[Float[Array, "queries heads value_size"], Float[Array, "queries heads"] | None]:
    """See `pallas_kernels.attention.api.attend`; `interpret` is that of `pallas_call`."""
    num_queries, heads, head_size = q.shape
    num_keys, kv_heads, value_size = v_new.shape
    lanes, columns = sight.page_table.shape
    page_size = pages.page_size
    tiling = Tiling.choose(
        num_queries=num_queries,
        lanes=lanes,
        max_queries=sight.max_queries,
        heads=heads,
        kv_heads=kv_heads,
        page_size=page_size,
        columns=columns,
    )
    operand = jnp.promote_types(q.dtype, pages.dtype)
    spread = None if sinks is None else jnp.broadcast_to(sinks.astype(jnp.float32)[:, None], (heads, LANES))
    scalars = Scalars(
        layer=jnp.asarray(layer, jnp.int32).reshape(1),
        query_offsets=sight.query_offsets,
        key_offsets=sight.key_offsets,
        page_table=sight.page_table,
        context_lengths=sight.context_lengths,
        first_visible=sight.first_visible,
        causal=sight.causal.astype(jnp.int32),
    )
    arrays = Arrays(
        q=q,
        k_new=k_new,
        v_new=v_new,
        k_pool=pages.stored_k,
        v_pool=pages.stored_v,
        visible=sight.visible if sight.visible.shape[1] else None,
        sinks=spread,
    )
    if num_keys == 0:  # the kernel needs something to point at
        zero = jnp.zeros((1, kv_heads, 1), k_new.dtype)
        arrays = arrays._replace(
            k_new=jnp.broadcast_to(zero, (1, kv_heads, head_size)),
            v_new=jnp.broadcast_to(zero, (1, kv_heads, value_size)),
        )
    hbm, vmem = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec(memory_space=pltpu.VMEM)
    rows, keys = tiling.rows, tiling.keys
    block = (2, tiling.block_pages, kv_heads)
    f32 = jnp.float32

    def by_row(count: int, size: int) -> Any:
        parts, width = split_width(size)
        return pltpu.VMEM((kv_heads, parts, count, width), f32)

    scratch = Scratch(
        q=pltpu.VMEM((2, tiling.queries, heads, head_size), q.dtype),
        k_new=pltpu.VMEM((2, keys, kv_heads, head_size), k_new.dtype),
        v_new=pltpu.VMEM((2, keys, kv_heads, value_size), v_new.dtype),
        k_pages=pltpu.VMEM((*block, head_size, page_size), pages.stored_k.dtype),
        v_pages=pltpu.VMEM((*block, *pages.stored_v.shape[3:]), pages.stored_v.dtype),
        q_rows=by_row(rows, head_size),
        k_rows=by_row(keys, head_size),
        v_rows=by_row(keys, value_size),
        out_rows=by_row(rows, value_size),
        first_visible=pltpu.VMEM((rows, LANES), jnp.int32),
        seen=pltpu.VMEM((rows, keys), jnp.int32),
        maximum=pltpu.VMEM((kv_heads, rows, LANES), f32),
        total=pltpu.VMEM((kv_heads, rows, LANES), f32),
        weighted=pltpu.VMEM((kv_heads, rows, value_size), f32),
        by_head=pltpu.VMEM((heads, value_size), f32),
        out=pltpu.VMEM((tiling.queries, heads, value_size), q.dtype),
        logsumexp=pltpu.VMEM((tiling.queries, heads, LANES), f32) if with_logsumexp else None,
        inputs_arrived=pltpu.SemaphoreType.DMA((2, 3)),
        pages_arrived=pltpu.SemaphoreType.DMA((2, 2)),
        results_left=pltpu.SemaphoreType.DMA((2,)),
    )
    results = Results(
        out=jax.ShapeDtypeStruct((num_queries, heads, value_size), q.dtype),
        logsumexp=jax.ShapeDtypeStruct((num_queries, heads, LANES), f32) if with_logsumexp else None,
    )
    context = lanes * columns * page_size
    held = sum(padded_bytes(buffer) for buffer in scratch)
    out, logsumexp = pl.pallas_call(
        functools.partial(
            attention_kernel,
            tiling=tiling,
            operand=operand,
            scale=scale,
            softcap=softcap,
            values_by_feature=pages.values_by_feature,
        ),
        name="attention",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[
                Arrays(
                    q=hbm,
                    k_new=hbm,
                    v_new=hbm,
                    k_pool=hbm,
                    v_pool=hbm,
                    visible=None if arrays.visible is None else vmem,
                    sinks=None if spread is None else vmem,
                )
            ],
            out_specs=Results(out=hbm, logsumexp=hbm if with_logsumexp else None),
            scratch_shapes=[scratch],
        ),
        out_shape=results,
        compiler_params=pltpu.CompilerParams(vmem_limit_bytes=held + 16 * 2**20, disable_bounds_checks=True),
        cost_estimate=pl.CostEstimate(
            flops=2 * sight.max_queries * heads * (head_size + value_size) * context,
            transcendentals=sight.max_queries * heads * context,
            bytes_accessed=context * kv_heads * (head_size + value_size) * pages.dtype.itemsize,
        ),
        interpret=interpret,
    )(*scalars, arrays)
    return out, None if logsumexp is None else logsumexp[:, :, 0]
