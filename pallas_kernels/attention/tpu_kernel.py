"""The kernel of attention for TPU.

One program walks over tiles of queries, lane by lane. A tile takes in its in-flight keys, then its
context block by block of pages; while a block is computed, the next one, be it the next lane's first,
is copied in. Masks of trees are read for in-flight keys only. A page below every query's window is
never copied.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tiling import Tiling
from pallas_kernels.attention.tpu_call import Call, Results, Scalars
from pallas_kernels.attention.tpu_copies import (
    await_results,
    clear_padding,
    input_copy,
    key_copies,
    page_copies,
    result_copies,
    start_inputs,
)
from pallas_kernels.attention.tpu_tiles import Tile, describe, key_tiles, lane_length, next_lane, tile_behind
from pallas_kernels.registers import LANES, joined, load_parts, store_parts

_LOWEST = -1e30  # below any score, yet finite: exp(-inf - _LOWEST) is 0 where exp(-inf + inf) is NaN


def attention_kernel(
    *refs: Any,
    tiling: Tiling,
    operand: jnp.dtype,
    scale: float,
    softcap: float | None,
    values_by_feature: bool,
) -> None:
    """The whole call; `refs` are Scalars, then Arrays, Results and Scratch."""
    scalars = Scalars(*refs[: len(Scalars._fields)])
    arrays, *results, scratch = refs[len(Scalars._fields) :]
    run(Call(scalars, arrays, Results(*results), scratch, tiling, operand, scale, softcap, values_by_feature))


def run(call: Call) -> None:
    first = describe(call, next_lane(call, jnp.int32(0)), jnp.int32(0))
    start_inputs(call, first, 0)

    def more(state: tuple[jax.Array, ...]) -> jax.Array:
        return state[0] < call.lanes

    zero = jnp.int32(0)
    # Tile, which of two buffers its inputs and its first block are in, whether that block is on its way,
    # and how many rows of results are.
    state = (*first, zero, zero, zero, zero)
    *_, leaving = jax.lax.while_loop(
        more, lambda state: compute_tile(call, Tile(*state[:6]), *state[6:]), state
    )
    await_results(call, leaving)
    clear_padding(call)


def compute_tile(
    call: Call, tile: Tile, slot: jax.Array, page_slot: jax.Array, started: jax.Array, leaving: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes one tile and sends it off; returns the state for the next one."""
    blocks = pl.cdiv(tile.end - tile.begin, call.tiling.block_pages)

    @pl.when(started == 0)
    def _() -> None:
        page_copies(call, tile, tile.begin, page_slot, "start")

    following = describe(call, *tile_behind(call, tile))
    start_inputs(call, following, 1 - slot)
    input_copy(call, tile, "q", slot, tile.count).wait()
    load_queries(call, tile, slot)
    add_in_flight(call, tile, slot)

    def add_block(b: jax.Array, _: None) -> None:
        column = tile.begin + b * call.tiling.block_pages
        here = (page_slot + b) % 2
        last = b + 1 == blocks
        ahead = Tile(*(jnp.where(last, new, old) for new, old in zip(following, tile, strict=True)))
        page_copies(
            call, ahead, jnp.where(last, following.begin, column + call.tiling.block_pages), 1 - here, "start"
        )
        page_copies(call, tile, column, here, "wait")
        add_context(call, tile, column, here)

    jax.lax.fori_loop(0, blocks, add_block, None)
    await_results(call, leaving)
    send(call, tile)
    on_its_way = jnp.where(blocks > 0, 1, 0)
    return (*following, 1 - slot, (page_slot + blocks) % 2, on_its_way, tile.count)


def for_heads(call: Call, together: int, body: Callable[[Any], None]) -> None:
    """Runs `body` for every kv head, so many at a time."""

    def some(i: Any, _: None) -> None:
        for h in range(together):
            body(i * together + h)

    if together == call.kv_heads:
        some(0, None)
    else:
        jax.lax.fori_loop(0, call.kv_heads // together, some, None)


def load_queries(call: Call, tile: Tile, slot: Any) -> None:
    """Sorts a tile's queries by kv head, and starts its softmax."""
    scratch, group = call.scratch, call.group
    start = call.scalars.query_offsets[tile.lane] + tile.first
    if call.arrays.sinks is None:
        scratch.maximum[...] = jnp.full_like(scratch.maximum, _LOWEST)
        scratch.total[...] = jnp.zeros_like(scratch.total)
    else:  # a key with the sink's logit and no value, seen before all others
        scratch.total[...] = jnp.ones_like(scratch.total)
    scratch.weighted[...] = jnp.zeros_like(scratch.weighted)

    def load(i: jax.Array, _: None) -> None:
        rows = pl.ds(i * group, group)
        q = scratch.q[slot, i].astype(jnp.float32)
        for h in range(call.kv_heads):
            heads = slice(h * group, (h + 1) * group)
            store_parts(scratch.q_rows, h, rows, q[heads])
            if call.arrays.sinks is not None:
                scratch.maximum[h, rows, :] = call.arrays.sinks[heads, :]
        first = call.scalars.first_visible[start + i]
        scratch.first_visible[rows, :] = jnp.full((group, LANES), first, jnp.int32)

    jax.lax.fori_loop(0, tile.count, load, None)


def add_in_flight(call: Call, tile: Tile, slot: Any) -> None:
    """Takes in the in-flight keys."""
    begin, end = key_tiles(call, tile)

    def add(key_tile: jax.Array, _: None) -> None:
        copies = key_copies(call, tile, key_tile, slot)

        @pl.when(key_tile > begin)
        def _() -> None:
            for copy in copies:
                copy.start()

        for copy in copies:
            copy.wait()
        load_keys(call, tile, key_tile, slot)
        mark_seen(call, tile, key_tile)
        seen = call.scratch.seen[...] != 0

        def head(h: Any) -> None:
            k = load_parts(call.scratch.k_rows, h).astype(call.operand)
            scores = product(call, query_rows(call, h), k, (((1,), (1,)), ((), ())))
            add_block(
                call,
                h,
                jnp.where(seen, capped(call, scores), -jnp.inf),
                [load_parts(call.scratch.v_rows, h)],
                token_axis=0,
            )

        for_heads(call, call.tiling.in_flight_heads, head)

    jax.lax.fori_loop(begin, end, add, None)


def load_keys(call: Call, tile: Tile, key_tile: jax.Array, slot: Any) -> None:
    """Sorts a tile of in-flight keys and values by kv head."""
    scratch = call.scratch
    count = lane_length(call, call.scalars.key_offsets, tile.lane) - key_tile * call.tiling.keys

    def clear(h: jax.Array, _: None) -> None:  # 0 * NaN would be NaN
        scratch.v_rows[h] = jnp.zeros_like(scratch.v_rows[h])

    jax.lax.fori_loop(0, call.kv_heads, clear, None)

    def load(j: jax.Array, _: None) -> None:
        k = scratch.k_new[slot, j].astype(jnp.float32)
        v = scratch.v_new[slot, j].astype(jnp.float32)
        for h in range(call.kv_heads):
            store_parts(scratch.k_rows, h, pl.ds(j, 1), k[h : h + 1])
            store_parts(scratch.v_rows, h, pl.ds(j, 1), v[h : h + 1])

    jax.lax.fori_loop(0, jnp.minimum(count, call.tiling.keys), load, None)


def mark_seen(call: Call, tile: Tile, key_tile: jax.Array) -> None:
    """Which in-flight keys of this tile of them each query sees."""
    scalars, width = call.scalars, call.tiling.keys
    keys = lane_length(call, scalars.key_offsets, tile.lane)
    ahead = keys - lane_length(call, scalars.query_offsets, tile.lane)
    context = scalars.context_lengths[tile.lane]
    causal = scalars.causal[tile.lane] != 0
    start = scalars.query_offsets[tile.lane] + tile.first
    within = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
    key = key_tile * width + within

    def mark(i: jax.Array, _: None) -> None:
        seen = (key <= tile.first + i + ahead) & (context + key >= scalars.first_visible[start + i])
        if call.arrays.visible is not None:
            word = visible_word(call, start + i, key_tile, within)
            bit = jax.lax.shift_right_logical(word, within % 32) & 1
            seen = jnp.where(causal, seen.astype(jnp.int32), bit) != 0
        row = jnp.where(seen & (key < keys), 1, 0)
        rows = pl.ds(i * call.group, call.group)
        call.scratch.seen[rows, :] = jnp.broadcast_to(row, (call.group, width))

    jax.lax.fori_loop(0, tile.count, mark, None)


def visible_word(call: Call, query: jax.Array, key_tile: jax.Array, within: jax.Array) -> jax.Array:
    """The word of `visible` that holds each key's bit: [1, keys]."""
    row = call.arrays.visible[pl.ds(query, 1), :]
    num_words, per_tile = row.shape[1], call.tiling.keys // 32
    word = jnp.zeros_like(within)
    for w in range(per_tile):
        if num_words <= per_tile:  # one tile holds all keys
            value = row[:, w : w + 1] if w < num_words else jnp.zeros((1, 1), jnp.int32)
        else:
            number = jax.lax.broadcasted_iota(jnp.int32, (1, num_words), 1)
            chosen = jnp.where(number == key_tile * per_tile + w, row, 0)
            value = jnp.sum(chosen, axis=1, keepdims=True)
        word = jnp.where(within // 32 == w, value, word)
    return word


def add_context(call: Call, tile: Tile, column: jax.Array, slot: Any) -> None:
    """Takes in one block of the context."""
    scratch, pages = call.scratch, call.tiling.block_pages
    context = call.scalars.context_lengths[tile.lane]
    position = column * call.page_size

    @pl.when((position < tile.lowest) | (position + call.block > context))
    def _() -> None:
        clear_values(call, tile, position, slot)

    key = position + jax.lax.broadcasted_iota(jnp.int32, (1, call.block), 1)
    seen = (key >= scratch.first_visible[:, :1]) & (key < context)

    def head(h: Any) -> None:
        q = query_rows(call, h)
        scores = [
            product(call, q, stored_operand(call, scratch.k_pages, slot, p, h), (((1,), (0,)), ((), ())))
            for p in range(pages)
        ]
        scores = jnp.concatenate(scores, axis=1) if pages > 1 else scores[0]
        values = [stored_operand(call, scratch.v_pages, slot, p, h) for p in range(pages)]
        token_axis = int(call.values_by_feature)
        add_block(call, h, jnp.where(seen, capped(call, scores), -jnp.inf), values, token_axis)

    for_heads(call, call.tiling.context_heads, head)


def clear_values(call: Call, tile: Tile, position: jax.Array, slot: Any) -> None:
    """Zeros the values of a block that are not held: a weight of 0 times NaN would be NaN."""
    context = call.scalars.context_lengths[tile.lane]
    shape = call.scratch.v_pages.shape[3:]

    def clear(i: jax.Array, _: None) -> None:
        p, h = i // call.kv_heads, i % call.kv_heads
        within = jax.lax.broadcasted_iota(jnp.int32, shape, int(call.values_by_feature))
        row = position + p * call.page_size + within
        values = call.scratch.v_pages[slot, p, h]
        held = (row >= tile.lowest) & (row < context)
        call.scratch.v_pages[slot, p, h] = jnp.where(held, values, jnp.zeros_like(values))

    jax.lax.fori_loop(0, call.tiling.block_pages * call.kv_heads, clear, None)


def query_rows(call: Call, h: Any) -> jax.Array:
    return load_parts(call.scratch.q_rows, h).astype(call.operand)


def stored_operand(call: Call, buffer: Any, slot: Any, page: int, h: Any) -> jax.Array:
    """A page's keys or values of one head, as operands."""
    values = buffer[slot, page, h]
    if values.dtype == jnp.uint16:
        values = pltpu.bitcast(values, jnp.bfloat16)
    return values.astype(call.operand)


def product(call: Call, left: jax.Array, right: jax.Array, dimensions: Any) -> jax.Array:
    precision = "highest" if call.operand == jnp.float32 else None
    return jax.lax.dot_general(
        left, right, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def capped(call: Call, scores: jax.Array) -> jax.Array:
    scores = scores * call.scale
    return scores if call.softcap is None else call.softcap * jnp.tanh(scores / call.softcap)


def add_block(call: Call, h: Any, scores: jax.Array, values: list[jax.Array], token_axis: int) -> None:
    """Goes on with a head's softmax; `values` are in parts along the keys."""
    scratch = call.scratch
    before = scratch.maximum[h]
    maximum = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.exp(scores - maximum[:, :1])
    decay = jnp.exp(before - maximum)
    scratch.maximum[h] = maximum
    scratch.total[h] = scratch.total[h] * decay + jnp.sum(weights, axis=1, keepdims=True)
    weighted = scratch.weighted[h] * decay[:, :1]
    weights = weights.astype(call.operand)
    start = 0
    for part in values:
        stop = start + part.shape[token_axis]
        weighted += product(
            call, weights[:, start:stop], part.astype(call.operand), (((1,), (token_axis,)), ((), ()))
        )
        start = stop
    scratch.weighted[h] = weighted


def send(call: Call, tile: Tile) -> None:
    """Normalises a tile, sorts it by query, and starts its way back."""
    scratch, group = call.scratch, call.group

    def normalise(h: jax.Array, _: None) -> None:
        total = scratch.total[h]
        seen = total != 0
        divisor = jnp.where(seen, total, 1)
        out = scratch.weighted[h] / divisor[:, :1]
        store_parts(scratch.out_rows, h, slice(None), jnp.where(seen[:, :1], out, 0))
        if scratch.logsumexp is not None:
            scratch.maximum[h] = jnp.where(seen, scratch.maximum[h] + jnp.log(divisor), -jnp.inf)

    jax.lax.fori_loop(0, call.kv_heads, normalise, None)

    def store(i: jax.Array, _: None) -> None:
        rows = pl.ds(i * group, group)
        for h in range(call.kv_heads):
            heads = pl.ds(h * group, group)
            out = [scratch.out_rows[h, part, rows, :] for part in range(scratch.out_rows.shape[1])]
            scratch.by_head[heads, :] = joined(out)
            if scratch.logsumexp is not None:
                scratch.logsumexp[i, heads, :] = scratch.maximum[h, rows, :]
        scratch.out[i] = scratch.by_head[...].astype(scratch.out.dtype)

    jax.lax.fori_loop(0, tile.count, store, None)
    row = call.scalars.query_offsets[tile.lane] + tile.first
    for copy in result_copies(call, row, tile.count):
        copy.start()
