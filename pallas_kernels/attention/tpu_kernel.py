"""The kernel of attention for TPU.

One program walks over tiles of queries, lane by lane. A tile takes in its in-flight keys, then its
context block by block of pages; while a block is computed, the next one, be it the next lane's first,
is copied in. Masks of trees are read for in-flight keys only. A page below every query's window is
never copied.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tiling import Tiling
from pallas_kernels.registers import LANES, joined, load_parts, store_parts

_LOWEST = -1e30  # below any score, yet finite: exp(-inf - _LOWEST) is 0 where exp(-inf + inf) is NaN
_NEVER = 2**31 - 1  # no position is behind it


class Scalars(NamedTuple):
    """What the kernel's loops are bounded by, in scalar memory."""

    layer: Any  # [1]
    query_offsets: Any
    key_offsets: Any
    page_table: Any
    context_lengths: Any
    first_visible: Any
    causal: Any  # [lanes], 0 or 1


class Arrays(NamedTuple):
    """Operands in HBM, but for visible [queries, words] and sinks [heads, 128], which are in VMEM."""

    q: Any
    k_new: Any
    v_new: Any
    k_pool: Any
    v_pool: Any
    visible: Any
    sinks: Any


class Results(NamedTuple):
    """In HBM."""

    out: Any
    logsumexp: Any  # [queries, heads, 128], equal along the last axis; None if not asked for


class Scratch(NamedTuple):
    """Memory on the chip; first axes of 2 are double buffers, `rows` are as in the reference's Tile."""

    q: Any  # [2, queries, heads, head_size]
    k_new: Any  # [2, keys, kv_heads, head_size]
    v_new: Any
    k_pages: Any  # [2, block_pages, kv_heads, head_size, page_size]
    v_pages: Any  # [2, block_pages, kv_heads, page_size, value_size]
    q_rows: Any  # [kv_heads, parts, rows, part of head_size] float32; see `split_width`
    k_rows: Any  # [kv_heads, parts, keys, part of head_size] float32
    v_rows: Any  # [kv_heads, parts, keys, part of value_size] float32, 0 where no key is
    out_rows: Any  # [kv_heads, parts, rows, part of value_size] float32
    first_visible: Any  # [rows, 128], equal along the last axis
    seen: Any  # [rows, keys] int32
    maximum: Any  # [kv_heads, rows, 128] float32, equal along the last axis
    total: Any
    weighted: Any  # [kv_heads, rows, value_size] float32
    by_head: Any  # [heads, value_size] float32
    out: Any  # [queries, heads, value_size]
    logsumexp: Any  # [queries, heads, 128] or None
    inputs_arrived: Any  # [2, 3] semaphores: q, k_new, v_new
    pages_arrived: Any  # [2, 2]: k, v
    results_left: Any  # [2]: out, logsumexp


class Tile(NamedTuple):
    """Some queries of one lane; `lane` is the number of lanes behind the last tile, which is empty."""

    lane: jax.Array
    first: jax.Array  # number of its first query within the lane
    count: jax.Array  # its queries
    lowest: jax.Array  # the least first_visible
    begin: jax.Array  # columns of the page table that it needs
    end: jax.Array


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
    _Call(
        scalars, arrays, Results(*results), scratch, tiling, operand, scale, softcap, values_by_feature
    ).run()


class _Call:
    """One traced call: its references and static sizes. Methods emit code; nothing is kept between them."""

    def __init__(
        self,
        scalars: Scalars,
        arrays: Arrays,
        results: Results,
        scratch: Scratch,
        tiling: Tiling,
        operand: jnp.dtype,
        scale: float,
        softcap: float | None,
        values_by_feature: bool,
    ) -> None:
        self.scalars, self.arrays, self.results, self.scratch = scalars, arrays, results, scratch
        self.tiling, self.operand, self.scale, self.softcap = tiling, operand, scale, softcap
        self.lanes = scalars.page_table.shape[0]
        self.num_queries = arrays.q.shape[0]
        self.kv_heads, self.head_size, self.page_size = arrays.k_pool.shape[2:]
        self.values_by_feature = values_by_feature
        self.group = arrays.q.shape[1] // self.kv_heads
        self.block = tiling.block_pages * self.page_size  # tokens

    def run(self) -> None:
        first = self.describe(self.next_lane(jnp.int32(0)), jnp.int32(0))
        self.start_inputs(first, 0)

        def more(state: tuple[jax.Array, ...]) -> jax.Array:
            return state[0] < self.lanes

        zero = jnp.int32(0)
        # Tile, which of two buffers its inputs and its first block are in, whether that block is on its way,
        # and how many rows of results are.
        state = (*first, zero, zero, zero, zero)
        *_, leaving = jax.lax.while_loop(more, lambda state: self.tile(Tile(*state[:6]), *state[6:]), state)
        self.await_results(leaving)
        self.clear_padding()

    def tile(
        self, tile: Tile, slot: jax.Array, page_slot: jax.Array, started: jax.Array, leaving: jax.Array
    ) -> tuple[jax.Array, ...]:
        """Computes one tile and sends it off; returns the state for the next one."""
        blocks = pl.cdiv(tile.end - tile.begin, self.tiling.block_pages)

        @pl.when(started == 0)
        def _() -> None:
            self.pages(tile, tile.begin, page_slot, "start")

        following = self.describe(*self.behind(tile))
        self.start_inputs(following, 1 - slot)
        self.copy(tile, "q", slot, tile.count).wait()
        self.load_queries(tile, slot)
        self.in_flight(tile, slot)

        def add_block(b: jax.Array, _: None) -> None:
            column = tile.begin + b * self.tiling.block_pages
            here = (page_slot + b) % 2
            last = b + 1 == blocks
            ahead = Tile(*(jnp.where(last, new, old) for new, old in zip(following, tile, strict=True)))
            self.pages(
                ahead, jnp.where(last, following.begin, column + self.tiling.block_pages), 1 - here, "start"
            )
            self.pages(tile, column, here, "wait")
            self.context_block(tile, column, here)

        jax.lax.fori_loop(0, blocks, add_block, None)
        self.await_results(leaving)
        self.send(tile)
        on_its_way = jnp.where(blocks > 0, 1, 0)
        return (*following, 1 - slot, (page_slot + blocks) % 2, on_its_way, tile.count)

    # Which tile comes when.

    def next_lane(self, lane: jax.Array) -> jax.Array:
        """The first lane from `lane` on that has queries; the number of lanes if none has."""

        def empty(l: jax.Array) -> jax.Array:
            return (l < self.lanes) & (self.length(self.scalars.query_offsets, l) == 0)

        return jax.lax.while_loop(empty, lambda l: l + 1, lane)

    def length(self, offsets: Any, lane: jax.Array) -> jax.Array:
        lane = jnp.minimum(lane, self.lanes - 1)
        return offsets[lane + 1] - offsets[lane]

    def behind(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """Lane and first query of the next tile."""
        first = tile.first + self.tiling.queries
        more = first < self.length(self.scalars.query_offsets, tile.lane)
        lane = self.next_lane(jnp.where(more, tile.lane, tile.lane + 1))
        return lane, jnp.where(more, first, 0)

    def describe(self, lane: jax.Array, first: jax.Array) -> Tile:
        real = lane < self.lanes
        bounded = jnp.minimum(lane, self.lanes - 1)
        start = self.scalars.query_offsets[bounded] + first
        count = jnp.minimum(self.tiling.queries, self.length(self.scalars.query_offsets, lane) - first)
        count = jnp.where(real, count, 0)
        lowest = jax.lax.fori_loop(
            0,
            count,
            lambda i, low: jnp.minimum(low, self.scalars.first_visible[start + i]),
            jnp.int32(_NEVER),
        )
        context = self.scalars.context_lengths[bounded]
        some = real & (lowest < context)
        begin = jnp.where(some, lowest // self.page_size, 0)
        end = jnp.where(some, pl.cdiv(context, self.page_size), 0)
        return Tile(lane=lane, first=first, count=count, lowest=lowest, begin=begin, end=end)

    def key_tiles(self, tile: Tile) -> tuple[jax.Array, jax.Array]:
        """Which tiles of its lane's in-flight keys it may see."""
        lane = jnp.minimum(tile.lane, self.lanes - 1)
        keys = self.length(self.scalars.key_offsets, lane)
        ahead = keys - self.length(self.scalars.query_offsets, lane)
        causal = self.scalars.causal[lane] != 0
        hidden = jnp.maximum(tile.lowest - self.scalars.context_lengths[lane], 0)
        begin = jnp.where(causal, hidden, 0) // self.tiling.keys
        seen = jnp.where(causal, jnp.clip(tile.first + tile.count + ahead, 0, keys), keys)
        return begin, jnp.where(tile.count > 0, pl.cdiv(seen, self.tiling.keys), 0)

    # Copies.

    def copy(self, tile: Tile, name: str, slot: Any, count: jax.Array, key: Any = 0) -> Any:
        """Of a tile's queries, or of its lane's in-flight keys from number `key` on."""
        offsets = self.scalars.query_offsets if name == "q" else self.scalars.key_offsets
        start = offsets[tile.lane] + (tile.first if name == "q" else key)
        return pltpu.make_async_copy(
            getattr(self.arrays, name).at[pl.ds(start, count)],
            getattr(self.scratch, name).at[slot, pl.ds(0, count)],
            self.scratch.inputs_arrived.at[slot, ("q", "k_new", "v_new").index(name)],
        )

    def key_copies(self, tile: Tile, key_tile: jax.Array, slot: Any) -> list[Any]:
        key = key_tile * self.tiling.keys
        count = jnp.minimum(self.length(self.scalars.key_offsets, tile.lane) - key, self.tiling.keys)
        return [self.copy(tile, name, slot, count, key) for name in ("k_new", "v_new")]

    def start_inputs(self, tile: Tile, slot: Any) -> None:
        begin, end = self.key_tiles(tile)

        @pl.when(tile.count > 0)
        def _() -> None:
            self.copy(tile, "q", slot, tile.count).start()

        @pl.when(begin < end)
        def _() -> None:
            for copy in self.key_copies(tile, begin, slot):
                copy.start()

    def pages(self, tile: Tile, column: jax.Array, slot: Any, action: str) -> None:
        """Starts or awaits the copies of a block's pages, those up to the tile's end."""

        def one(p: jax.Array, _: None) -> None:
            page = self.scalars.page_table[tile.lane, column + p] if action == "start" else 0
            for kind, pool, buffer in (
                (0, self.arrays.k_pool, self.scratch.k_pages),
                (1, self.arrays.v_pool, self.scratch.v_pages),
            ):
                arrived = self.scratch.pages_arrived.at[slot, kind]
                copy = pltpu.make_async_copy(
                    pool.at[self.scalars.layer[0], page], buffer.at[slot, p], arrived
                )
                getattr(copy, action)()

        jax.lax.fori_loop(0, jnp.clip(tile.end - column, 0, self.tiling.block_pages), one, None)

    def result_copies(self, row: Any, count: jax.Array) -> list[Any]:
        pairs = [(self.scratch.out, self.results.out), (self.scratch.logsumexp, self.results.logsumexp)]
        return [
            pltpu.make_async_copy(
                source.at[pl.ds(0, count)],
                target.at[pl.ds(row, count)],
                self.scratch.results_left.at[i],
            )
            for i, (source, target) in enumerate(pairs)
            if source is not None
        ]

    def await_results(self, count: jax.Array) -> None:
        @pl.when(count > 0)
        def _() -> None:
            for copy in self.result_copies(0, count):
                copy.wait()

    def clear_padding(self) -> None:
        """Queries that no lane owns get 0, and a log-sum-exp of -inf."""
        owned = self.scalars.query_offsets[self.lanes]
        self.scratch.out[...] = jnp.zeros_like(self.scratch.out)
        if self.scratch.logsumexp is not None:
            self.scratch.logsumexp[...] = jnp.full_like(self.scratch.logsumexp, -jnp.inf)

        def clear(i: jax.Array, _: None) -> None:
            row = owned + i * self.tiling.queries
            count = jnp.minimum(self.num_queries - row, self.tiling.queries)
            for copy in self.result_copies(row, count):
                copy.start()
                copy.wait()

        jax.lax.fori_loop(0, pl.cdiv(self.num_queries - owned, self.tiling.queries), clear, None)

    # Mathematics.

    def for_heads(self, together: int, body: Callable[[Any], None]) -> None:
        """Runs `body` for every kv head, so many at a time."""

        def some(i: Any, _: None) -> None:
            for h in range(together):
                body(i * together + h)

        if together == self.kv_heads:
            some(0, None)
        else:
            jax.lax.fori_loop(0, self.kv_heads // together, some, None)

    def load_queries(self, tile: Tile, slot: Any) -> None:
        """Sorts a tile's queries by kv head, and starts its softmax."""
        scratch, group = self.scratch, self.group
        start = self.scalars.query_offsets[tile.lane] + tile.first
        if self.arrays.sinks is None:
            scratch.maximum[...] = jnp.full_like(scratch.maximum, _LOWEST)
            scratch.total[...] = jnp.zeros_like(scratch.total)
        else:  # a key with the sink's logit and no value, seen before all others
            scratch.total[...] = jnp.ones_like(scratch.total)
        scratch.weighted[...] = jnp.zeros_like(scratch.weighted)

        def load(i: jax.Array, _: None) -> None:
            rows = pl.ds(i * group, group)
            q = scratch.q[slot, i].astype(jnp.float32)
            for h in range(self.kv_heads):
                heads = slice(h * group, (h + 1) * group)
                store_parts(scratch.q_rows, h, rows, q[heads])
                if self.arrays.sinks is not None:
                    scratch.maximum[h, rows, :] = self.arrays.sinks[heads, :]
            first = self.scalars.first_visible[start + i]
            scratch.first_visible[rows, :] = jnp.full((group, LANES), first, jnp.int32)

        jax.lax.fori_loop(0, tile.count, load, None)

    def in_flight(self, tile: Tile, slot: Any) -> None:
        """Takes in the in-flight keys."""
        begin, end = self.key_tiles(tile)

        def add(key_tile: jax.Array, _: None) -> None:
            copies = self.key_copies(tile, key_tile, slot)

            @pl.when(key_tile > begin)
            def _() -> None:
                for copy in copies:
                    copy.start()

            for copy in copies:
                copy.wait()
            self.load_keys(tile, key_tile, slot)
            self.mark_seen(tile, key_tile)
            seen = self.scratch.seen[...] != 0

            def head(h: Any) -> None:
                k = load_parts(self.scratch.k_rows, h).astype(self.operand)
                scores = self.product(self.queries(h), k, (((1,), (1,)), ((), ())))
                self.add(
                    h,
                    jnp.where(seen, self.cap(scores), -jnp.inf),
                    [load_parts(self.scratch.v_rows, h)],
                    token_axis=0,
                )

            self.for_heads(self.tiling.in_flight_heads, head)

        jax.lax.fori_loop(begin, end, add, None)

    def load_keys(self, tile: Tile, key_tile: jax.Array, slot: Any) -> None:
        """Sorts a tile of in-flight keys and values by kv head."""
        scratch = self.scratch
        count = self.length(self.scalars.key_offsets, tile.lane) - key_tile * self.tiling.keys

        def clear(h: jax.Array, _: None) -> None:  # 0 * NaN would be NaN
            scratch.v_rows[h] = jnp.zeros_like(scratch.v_rows[h])

        jax.lax.fori_loop(0, self.kv_heads, clear, None)

        def load(j: jax.Array, _: None) -> None:
            k = scratch.k_new[slot, j].astype(jnp.float32)
            v = scratch.v_new[slot, j].astype(jnp.float32)
            for h in range(self.kv_heads):
                store_parts(scratch.k_rows, h, pl.ds(j, 1), k[h : h + 1])
                store_parts(scratch.v_rows, h, pl.ds(j, 1), v[h : h + 1])

        jax.lax.fori_loop(0, jnp.minimum(count, self.tiling.keys), load, None)

    def mark_seen(self, tile: Tile, key_tile: jax.Array) -> None:
        """Which in-flight keys of this tile of them each query sees."""
        scalars, width = self.scalars, self.tiling.keys
        keys = self.length(scalars.key_offsets, tile.lane)
        ahead = keys - self.length(scalars.query_offsets, tile.lane)
        context = scalars.context_lengths[tile.lane]
        causal = scalars.causal[tile.lane] != 0
        start = scalars.query_offsets[tile.lane] + tile.first
        within = jax.lax.broadcasted_iota(jnp.int32, (1, width), 1)
        key = key_tile * width + within

        def mark(i: jax.Array, _: None) -> None:
            seen = (key <= tile.first + i + ahead) & (context + key >= scalars.first_visible[start + i])
            if self.arrays.visible is not None:
                word = self.word(start + i, key_tile, within)
                bit = jax.lax.shift_right_logical(word, within % 32) & 1
                seen = jnp.where(causal, seen.astype(jnp.int32), bit) != 0
            row = jnp.where(seen & (key < keys), 1, 0)
            rows = pl.ds(i * self.group, self.group)
            self.scratch.seen[rows, :] = jnp.broadcast_to(row, (self.group, width))

        jax.lax.fori_loop(0, tile.count, mark, None)

    def word(self, query: jax.Array, key_tile: jax.Array, within: jax.Array) -> jax.Array:
        """The word of `visible` that holds each key's bit: [1, keys]."""
        row = self.arrays.visible[pl.ds(query, 1), :]
        num_words, per_tile = row.shape[1], self.tiling.keys // 32
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

    def context_block(self, tile: Tile, column: jax.Array, slot: Any) -> None:
        """Takes in one block of the context."""
        scratch, pages = self.scratch, self.tiling.block_pages
        context = self.scalars.context_lengths[tile.lane]
        position = column * self.page_size

        @pl.when((position < tile.lowest) | (position + self.block > context))
        def _() -> None:
            self.clear_values(tile, position, slot)

        key = position + jax.lax.broadcasted_iota(jnp.int32, (1, self.block), 1)
        seen = (key >= scratch.first_visible[:, :1]) & (key < context)

        def head(h: Any) -> None:
            q = self.queries(h)
            scores = [
                self.product(q, self.stored(scratch.k_pages, slot, p, h), (((1,), (0,)), ((), ())))
                for p in range(pages)
            ]
            scores = jnp.concatenate(scores, axis=1) if pages > 1 else scores[0]
            values = [self.stored(scratch.v_pages, slot, p, h) for p in range(pages)]
            token_axis = int(self.values_by_feature)
            self.add(h, jnp.where(seen, self.cap(scores), -jnp.inf), values, token_axis)

        self.for_heads(self.tiling.context_heads, head)

    def clear_values(self, tile: Tile, position: jax.Array, slot: Any) -> None:
        """Zeros the values of a block that are not held: a weight of 0 times NaN would be NaN."""
        context = self.scalars.context_lengths[tile.lane]
        shape = self.scratch.v_pages.shape[3:]

        def clear(i: jax.Array, _: None) -> None:
            p, h = i // self.kv_heads, i % self.kv_heads
            within = jax.lax.broadcasted_iota(jnp.int32, shape, int(self.values_by_feature))
            row = position + p * self.page_size + within
            values = self.scratch.v_pages[slot, p, h]
            held = (row >= tile.lowest) & (row < context)
            self.scratch.v_pages[slot, p, h] = jnp.where(held, values, jnp.zeros_like(values))

        jax.lax.fori_loop(0, self.tiling.block_pages * self.kv_heads, clear, None)

    def queries(self, h: Any) -> jax.Array:
        return load_parts(self.scratch.q_rows, h).astype(self.operand)

    def stored(self, buffer: Any, slot: Any, page: int, h: Any) -> jax.Array:
        """A page's keys or values of one head, as operands."""
        values = buffer[slot, page, h]
        if values.dtype == jnp.uint16:
            values = pltpu.bitcast(values, jnp.bfloat16)
        return values.astype(self.operand)

    def product(self, left: jax.Array, right: jax.Array, dimensions: Any) -> jax.Array:
        precision = "highest" if self.operand == jnp.float32 else None
        return jax.lax.dot_general(
            left, right, dimensions, precision=precision, preferred_element_type=jnp.float32
        )

    def cap(self, scores: jax.Array) -> jax.Array:
        scores = scores * self.scale
        return scores if self.softcap is None else self.softcap * jnp.tanh(scores / self.softcap)

    def add(self, h: Any, scores: jax.Array, values: list[jax.Array], token_axis: int) -> None:
        """Goes on with a head's softmax; `values` are in parts along the keys."""
        scratch = self.scratch
        before = scratch.maximum[h]
        maximum = jnp.maximum(before, jnp.max(scores, axis=1, keepdims=True))
        weights = jnp.exp(scores - maximum[:, :1])
        decay = jnp.exp(before - maximum)
        scratch.maximum[h] = maximum
        scratch.total[h] = scratch.total[h] * decay + jnp.sum(weights, axis=1, keepdims=True)
        weighted = scratch.weighted[h] * decay[:, :1]
        weights = weights.astype(self.operand)
        start = 0
        for part in values:
            stop = start + part.shape[token_axis]
            weighted += self.product(
                weights[:, start:stop], part.astype(self.operand), (((1,), (token_axis,)), ((), ()))
            )
            start = stop
        scratch.weighted[h] = weighted

    def send(self, tile: Tile) -> None:
        """Normalises a tile, sorts it by query, and starts its way back."""
        scratch, group = self.scratch, self.group

        def normalise(h: jax.Array, _: None) -> None:
            total = scratch.total[h]
            seen = total != 0
            divisor = jnp.where(seen, total, 1)
            out = scratch.weighted[h] / divisor[:, :1]
            store_parts(scratch.out_rows, h, slice(None), jnp.where(seen[:, :1], out, 0))
            if scratch.logsumexp is not None:
                scratch.maximum[h] = jnp.where(seen, scratch.maximum[h] + jnp.log(divisor), -jnp.inf)

        jax.lax.fori_loop(0, self.kv_heads, normalise, None)

        def store(i: jax.Array, _: None) -> None:
            rows = pl.ds(i * group, group)
            for h in range(self.kv_heads):
                heads = pl.ds(h * group, group)
                out = [scratch.out_rows[h, part, rows, :] for part in range(scratch.out_rows.shape[1])]
                scratch.by_head[heads, :] = joined(out)
                if scratch.logsumexp is not None:
                    scratch.logsumexp[i, heads, :] = scratch.maximum[h, rows, :]
            scratch.out[i] = scratch.by_head[...].astype(scratch.out.dtype)

        jax.lax.fori_loop(0, tile.count, store, None)
        row = self.scalars.query_offsets[tile.lane] + tile.first
        for copy in self.result_copies(row, tile.count):
            copy.start()
