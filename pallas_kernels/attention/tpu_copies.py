"""What the TPU kernel of attention copies between HBM and the chip."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.attention.tpu_call import Call
from pallas_kernels.attention.tpu_tiles import Tile, key_tiles, lane_length


def input_copy(call: Call, tile: Tile, name: str, slot: Any, count: jax.Array, key: Any = 0) -> Any:
    """Of a tile's queries, or of its lane's in-flight keys from number `key` on."""
    offsets = call.scalars.query_offsets if name == "q" else call.scalars.key_offsets
    start = offsets[tile.lane] + (tile.first if name == "q" else key)
    return pltpu.make_async_copy(
        getattr(call.arrays, name).at[pl.ds(start, count)],
        getattr(call.scratch, name).at[slot, pl.ds(0, count)],
        call.scratch.inputs_arrived.at[slot, ("q", "k_new", "v_new").index(name)],
    )


def key_copies(call: Call, tile: Tile, key_tile: jax.Array, slot: Any) -> list[Any]:
    key = key_tile * call.tiling.keys
    count = jnp.minimum(lane_length(call, call.scalars.key_offsets, tile.lane) - key, call.tiling.keys)
    return [input_copy(call, tile, name, slot, count, key) for name in ("k_new", "v_new")]


def start_inputs(call: Call, tile: Tile, slot: Any) -> None:
    begin, end = key_tiles(call, tile)

    @pl.when(tile.count > 0)
    def _() -> None:
        input_copy(call, tile, "q", slot, tile.count).start()

    @pl.when(begin < end)
    def _() -> None:
        for copy in key_copies(call, tile, begin, slot):
            copy.start()


def page_copies(call: Call, tile: Tile, column: jax.Array, slot: Any, action: str) -> None:
    """Starts or awaits the copies of a block's pages, those up to the tile's end."""

    def one(p: jax.Array, _: None) -> None:
        page = call.scalars.page_table[tile.lane, column + p] if action == "start" else 0
        for kind, pool, buffer in (
            (0, call.arrays.k_pool, call.scratch.k_pages),
            (1, call.arrays.v_pool, call.scratch.v_pages),
        ):
            arrived = call.scratch.pages_arrived.at[slot, kind]
            copy = pltpu.make_async_copy(pool.at[call.scalars.layer[0], page], buffer.at[slot, p], arrived)
            getattr(copy, action)()

    jax.lax.fori_loop(0, jnp.clip(tile.end - column, 0, call.tiling.block_pages), one, None)


def result_copies(call: Call, row: Any, count: jax.Array) -> list[Any]:
    pairs = [(call.scratch.out, call.results.out), (call.scratch.logsumexp, call.results.logsumexp)]
    return [
        pltpu.make_async_copy(
            source.at[pl.ds(0, count)],
            target.at[pl.ds(row, count)],
            call.scratch.results_left.at[i],
        )
        for i, (source, target) in enumerate(pairs)
        if source is not None
    ]


def await_results(call: Call, count: jax.Array) -> None:
    @pl.when(count > 0)
    def _() -> None:
        for copy in result_copies(call, 0, count):
            copy.wait()


def clear_padding(call: Call) -> None:
    """Queries that no lane owns get 0, and a log-sum-exp of -inf."""
    owned = call.scalars.query_offsets[call.lanes]
    call.scratch.out[...] = jnp.zeros_like(call.scratch.out)
    if call.scratch.logsumexp is not None:
        call.scratch.logsumexp[...] = jnp.full_like(call.scratch.logsumexp, -jnp.inf)

    def clear(i: jax.Array, _: None) -> None:
        row = owned + i * call.tiling.queries
        count = jnp.minimum(call.num_queries - row, call.tiling.queries)
        for copy in result_copies(call, row, count):
            copy.start()
            copy.wait()

    jax.lax.fori_loop(0, pl.cdiv(call.num_queries - owned, call.tiling.queries), clear, None)
