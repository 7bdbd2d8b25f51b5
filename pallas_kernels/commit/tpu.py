"""Committing as a Mosaic kernel for TPU.

Memory is copied in whole registers there, so a lane's new rows are put into windows of 128 tokens that
are read, changed and written back: for every window of every lane, all layers one after the other,
where one layer's copies run while another one's window is changed.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.attention.pages import Pages
from pallas_kernels.registers import LANES, load_parts, padded_bytes, split_width, store_parts


class Scalars(NamedTuple):
    """What the kernel's loops are bounded by, in scalar memory."""

    path: Any
    counts: Any  # [lanes] of new tokens
    page_table: Any
    lengths: Any


class Half(NamedTuple):
    """Keys, or values: their operands in HBM and their buffers on the chip, in which 2 are double buffers."""

    new: Any  # [layers, nodes, kv_heads, head_size]
    pool: Any
    rows: Any  # [2, rows, kv_heads, head_size]: what is committed
    before: Any  # [2, kv_heads, ...]: a window as it is read
    after: Any  # [2, kv_heads, ...]: and as it is written
    placed: Any  # [kv_heads, parts, window, part of head_size] float32: rows at their places in the window
    arrived: Any  # [2, 2] semaphores: window, rows
    left: Any  # [2]
    by_feature: bool


class Window(NamedTuple):
    """A lane's new tokens that lie in one window."""

    page: jax.Array
    offset: jax.Array  # of the window in the page
    begin: jax.Array  # its first new token, counted from the window's start
    count: jax.Array
    lane: jax.Array
    entry: jax.Array  # of its first new token in the lane's path
    node: jax.Array  # of the same
    in_a_row: jax.Array  # whether the others' nodes follow that one


@functools.partial(jax.jit, static_argnames=("interpret",))
def commit_rows(
    pages: Pages,
    k_new: Float[Array, "layers nodes kv_heads head_size"],
    v_new: Float[Array, "layers nodes kv_heads head_size"],
    path: Int[Array, "lanes commits"],
    page_table: Int[Array, "lanes columns"],
    lengths: Int[Array, "lanes"],
    *,
    interpret: Any = False,
) -> Pages:
    """See `pallas_kernels.commit.api.commit_rows`; `interpret` is that of `pallas_call`."""
    layers, _, kv_heads, head_size, page_size = pages.stored_k.shape
    window = LANES if page_size % LANES == 0 else page_size
    rows = min(window, path.shape[1])
    scalars = Scalars(
        path=path,
        counts=jnp.sum(path >= 0, axis=1, dtype=jnp.int32),
        page_table=page_table,
        lengths=lengths,
    )

    def buffers(size: int, by_feature: bool, dtype: Any) -> list[Any]:
        parts, width = split_width(size)
        shape = (2, kv_heads, size, window) if by_feature else (2, kv_heads, window, size)
        return [
            pltpu.VMEM((2, rows, kv_heads, size), pages.dtype),
            pltpu.VMEM(shape, dtype),
            pltpu.VMEM(shape, dtype),
            pltpu.VMEM((kv_heads, parts, window, width), jnp.float32),
            pltpu.SemaphoreType.DMA((2, 2)),
            pltpu.SemaphoreType.DMA((2,)),
        ]

    scratch = [
        buffers(head_size, True, pages.stored_k.dtype),
        buffers(pages.value_size, pages.values_by_feature, pages.stored_v.dtype),
    ]
    hbm = pl.BlockSpec(memory_space=pl.ANY)
    first = len(scalars) + 2
    touched = layers * path.shape[0] * kv_heads * (head_size + pages.value_size) * window
    stored_k, stored_v = pl.pallas_call(
        functools.partial(_kernel, values_by_feature=pages.values_by_feature, window=window),
        name="commit",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=(1,),
            in_specs=[hbm] * 4,
            out_specs=[hbm] * 2,
            scratch_shapes=scratch,
        ),
        out_shape=[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in (pages.stored_k, pages.stored_v)],
        input_output_aliases={first: 0, first + 1: 1},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=sum(padded_bytes(b) for half in scratch for b in half) + 16 * 2**20,
            disable_bounds_checks=True,
        ),
        cost_estimate=pl.CostEstimate(
            flops=0, transcendentals=0, bytes_accessed=2 * touched * pages.dtype.itemsize
        ),
        interpret=interpret,
    )(*scalars, k_new.astype(pages.dtype), v_new.astype(pages.dtype), pages.stored_k, pages.stored_v)
    return dataclasses.replace(pages, stored_k=stored_k, stored_v=stored_v)


def _kernel(*refs: Any, values_by_feature: bool, window: int) -> None:
    scalars = Scalars(*refs[: len(Scalars._fields)])
    k_new, v_new, _, _, k_pool, v_pool, k_buffers, v_buffers = refs[len(Scalars._fields) :]
    halves = [_half(k_new, k_pool, k_buffers, True), _half(v_new, v_pool, v_buffers, values_by_feature)]
    page_size = k_pool.shape[-1]

    def lane(l: jax.Array, _: None) -> None:
        count, length = scalars.counts[l], scalars.lengths[l]

        def one(w: jax.Array, _: None) -> None:
            position = w * window
            begin = jnp.maximum(length, position)
            number = jnp.minimum(length + count, position + window) - begin
            entry = begin - length
            node = scalars.path[l, entry]
            follows = jax.lax.fori_loop(
                0,
                number,
                lambda j, so_far: jnp.where(scalars.path[l, entry + j] == node + j, so_far, 0),
                jnp.int32(1),
            )
            part = Window(
                page=scalars.page_table[l, position // page_size],
                offset=pl.multiple_of(position % page_size, window),
                begin=begin - position,
                count=number,
                lane=l,
                entry=entry,
                node=node,
                in_a_row=follows != 0,
            )
            _change(part, scalars, halves, window)

        last = jnp.where(count > 0, pl.cdiv(length + count, window), 0)
        jax.lax.fori_loop(jnp.where(count > 0, length // window, 0), last, one, None)

    jax.lax.fori_loop(0, scalars.counts.shape[0], lane, None)


def _half(new: Any, pool: Any, buffers: list[Any], by_feature: bool) -> Half:
    rows, before, after, placed, arrived, left = buffers
    return Half(new, pool, rows, before, after, placed, arrived, left, by_feature)


def _change(part: Window, scalars: Scalars, halves: list[Half], window: int) -> None:
    """Puts a lane's new rows into one window, in every layer."""
    layers = halves[0].pool.shape[0]

    def in_pool(half: Half, layer: Any) -> Any:
        tokens = pl.ds(part.offset, window)
        at = (layer, part.page, slice(None))
        return half.pool.at[(*at, slice(None), tokens) if half.by_feature else (*at, tokens, slice(None))]

    def read(layer: Any, slot: Any, action: str) -> None:
        for half in halves:
            copy = pltpu.make_async_copy(in_pool(half, layer), half.before.at[slot], half.arrived.at[slot, 0])
            getattr(copy, action)()

            @pl.when(part.in_a_row)
            def _(half: Half = half) -> None:
                copy = pltpu.make_async_copy(
                    half.new.at[layer, pl.ds(part.node, part.count)],
                    half.rows.at[slot, pl.ds(0, part.count)],
                    half.arrived.at[slot, 1],
                )
                getattr(copy, action)()

            @pl.when(~part.in_a_row)
            def _(half: Half = half) -> None:
                def row(j: jax.Array, _: None) -> None:
                    node = scalars.path[part.lane, part.entry + j]
                    copy = pltpu.make_async_copy(
                        half.new.at[layer, node], half.rows.at[slot, j], half.arrived.at[slot, 1]
                    )
                    getattr(copy, action)()

                jax.lax.fori_loop(0, part.count, row, None)

    def write(layer: Any, slot: Any, action: str) -> None:
        for half in halves:
            copy = pltpu.make_async_copy(half.after.at[slot], in_pool(half, layer), half.left.at[slot])
            getattr(copy, action)()

    def one_layer(layer: jax.Array, _: None) -> None:
        slot = layer % 2

        @pl.when(layer + 1 < layers)
        def _() -> None:
            read(layer + 1, 1 - slot, "start")

        read(layer, slot, "wait")

        @pl.when(layer >= 2)
        def _() -> None:
            write(layer, slot, "wait")

        for half in halves:
            _replace(part, half, slot, window)
        write(layer, slot, "start")

    read(0, 0, "start")
    jax.lax.fori_loop(0, layers, one_layer, None)
    for layer in range(max(layers - 2, 0), layers):
        write(layer, layer % 2, "wait")


def _replace(part: Window, half: Half, slot: Any, window: int) -> None:
    """The window as it will be: new rows at their places, the rest as it was."""
    kv_heads = half.rows.shape[2]

    def place(j: jax.Array, _: None) -> None:
        row = half.rows[slot, j].astype(jnp.float32)
        for h in range(kv_heads):
            store_parts(half.placed, h, pl.ds(part.begin + j, 1), row[h : h + 1])

    jax.lax.fori_loop(0, part.count, place, None)
    dtype = half.rows.dtype

    def head(h: jax.Array, _: None) -> None:
        rows = load_parts(half.placed, h)
        new = (rows.T if half.by_feature else rows).astype(dtype)
        before = half.before[slot, h]
        if before.dtype != dtype:
            new = pltpu.bitcast(new, before.dtype)
        token = jax.lax.broadcasted_iota(jnp.int32, before.shape, int(half.by_feature))
        changed = (token >= part.begin) & (token < part.begin + part.count)
        half.after[slot, h] = jnp.where(changed, new, before)

    jax.lax.fori_loop(0, kv_heads, head, None)
