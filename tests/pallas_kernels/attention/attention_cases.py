"""Calls of attend over drawn lengths, pages and masks, with NaN wherever nothing may be read."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from dense_oracle import Lane, causal_mask, dense, pack_bits
from hypothesis import strategies as st

from pallas_kernels.attention.pages import Pages, allocate
from pallas_kernels.attention.sight import Sight
from pallas_kernels.commit.api import commit_rows

LAYERS, LAYER = 2, 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """Static sizes: one compiled program each."""

    lanes: int
    queries: int  # packed, padding included
    keys: int
    max_queries: int
    max_keys: int
    columns: int
    page_size: int
    kv_heads: int
    group: int
    words: int
    softcap: float | None = None
    sinks: bool = False
    scale: float = 0.7
    head_size: int = 4
    dtype: str = "float32"
    platform: str = "cpu"  # whose layout the pool has


write = jax.jit(commit_rows)


def nan_pool(shape: Shape, num_pages: int) -> Pages:
    pages = allocate(
        num_layers=LAYERS,
        num_pages=num_pages,
        page_size=shape.page_size,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=shape.dtype,
        platform=shape.platform,
    )
    # 0xFFFF is a NaN of bfloat16.
    return jax.tree.map(
        lambda leaf: jnp.full_like(leaf, 0xFFFF if leaf.dtype == jnp.uint16 else jnp.nan), pages
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The arguments of one call, all padding NaN or absurd, and what each lane really holds."""

    shape: Shape
    # To q, k, v, pages, layer, sight, sinks: made outside of Hypothesis's drawing, in which nothing may compile.
    arguments: Callable[[], tuple]
    lanes: list[Lane]

    def expected(self) -> tuple[np.ndarray, np.ndarray]:
        heads = self.shape.kv_heads * self.shape.group
        out = np.zeros((self.shape.queries, heads, self.shape.head_size))
        logsumexp = np.full((self.shape.queries, heads), -np.inf)
        start = 0
        for lane in self.lanes:
            stop = start + len(lane.q)
            sinks = None if self.arguments()[-1] is None else np.asarray(self.arguments()[-1])
            out[start:stop], logsumexp[start:stop] = dense(
                lane, scale=self.shape.scale, softcap=self.shape.softcap, sinks=sinks
            )
            start = stop
        return out, logsumexp


def split(draw, total: int, parts: int, most: int) -> list[int]:
    counts = []
    for _ in range(parts):
        counts.append(draw(st.integers(0, min(most, total - sum(counts)))))
    return counts


@st.composite
def cases(draw, shapes: list[Shape]) -> Case:
    shape = draw(st.sampled_from(shapes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    capacity = shape.columns * shape.page_size
    num_queries = split(draw, shape.queries, shape.lanes, shape.max_queries)
    num_keys = split(draw, shape.keys, shape.lanes, shape.max_keys)
    contexts = [draw(st.integers(0, capacity)) for _ in range(shape.lanes)]
    causal = [not shape.words or draw(st.booleans()) for _ in range(shape.lanes)]
    rings = [draw(st.integers(1, shape.columns)) for _ in range(shape.lanes)]  # pages that a lane owns

    num_pages = shape.lanes * shape.columns + 2
    free = list(rng.permutation(num_pages))
    table = np.empty((shape.lanes, shape.columns), np.int32)
    lanes, firsts, words = [], [], []

    def normal(*size: int) -> np.ndarray:
        numbers = rng.normal(size=size).astype(np.float32) * 2
        return np.asarray(numbers.astype(jnp.dtype(shape.dtype)), np.float32)

    committed = [normal(LAYERS, shape.lanes * capacity, shape.kv_heads, shape.head_size) for _ in range(2)]
    path = np.full((shape.lanes, capacity), -1, np.int32)
    for l in range(shape.lanes):
        own = [free.pop() for _ in range(rings[l])]
        if l and rings[0] == rings[l] == shape.columns and draw(st.booleans()):
            # A prefix in common: the same full pages.
            shared = min(contexts[0], contexts[l]) // shape.page_size
            own[:shared] = table[0, :shared]
            for rows in committed:
                first = l * capacity
                rows[:, first : first + shared * shape.page_size] = rows[:, : shared * shape.page_size]
        table[l] = [own[c % len(own)] for c in range(shape.columns)]
        path[l, : contexts[l]] = l * capacity + np.arange(contexts[l])
        # Rows that a newer one has overwritten in the ring must not be in sight.
        lowest = max(0, contexts[l] - rings[l] * shape.page_size)
        highest = contexts[l] + num_keys[l]
        first = rng.integers(lowest, highest, endpoint=True, size=num_queries[l])
        if draw(st.booleans()):
            first[:] = lowest
        sees = rng.random((num_queries[l], num_keys[l])) < 0.5
        if causal[l]:
            sees = causal_mask(num_queries[l], num_keys[l], contexts[l], first)
        context = [c[LAYER, l * capacity : l * capacity + contexts[l]] for c in committed]
        lanes.append(
            Lane(
                q=normal(num_queries[l], shape.kv_heads * shape.group, shape.head_size),
                context_k=context[0],
                context_v=context[1],
                k=normal(num_keys[l], shape.kv_heads, shape.head_size),
                v=normal(num_keys[l], shape.kv_heads, shape.head_size),
                first_visible=first,
                sees=sees,
            )
        )
        firsts.append(first)
        # A causal lane's words are not to be read.
        words.append(pack_bits((sees ^ causal[l])[:, : shape.words * 32], shape.words))

    def packed(parts: list[np.ndarray], rows: int, padding: float, dtype: type) -> jax.Array:
        joined = np.concatenate(parts).astype(dtype)
        return jnp.asarray(
            np.concatenate([joined, np.full((rows - len(joined), *joined.shape[1:]), padding, dtype)])
        )

    sinks = normal(shape.kv_heads * shape.group) if shape.sinks else None

    @functools.cache
    def arguments() -> tuple:
        pages = write(
            nan_pool(shape, num_pages),
            *(jnp.asarray(rows, shape.dtype) for rows in committed),
            jnp.asarray(path),
            jnp.asarray(table),
            jnp.zeros(shape.lanes, jnp.int32),
        )
        sight = Sight(
            query_offsets=jnp.asarray(np.cumsum([0, *num_queries]), jnp.int32),
            key_offsets=jnp.asarray(np.cumsum([0, *num_keys]), jnp.int32),
            page_table=jnp.asarray(table),
            context_lengths=jnp.asarray(contexts, jnp.int32),
            first_visible=packed(firsts, shape.queries, -7, np.int32),
            causal=jnp.asarray(causal),
            visible=packed(words, shape.queries, -1, np.int32),
            max_queries=shape.max_queries,
            max_keys=shape.max_keys,
        )
        made = (
            packed([lane.q for lane in lanes], shape.queries, np.nan, jnp.dtype(shape.dtype)),
            packed([lane.k for lane in lanes], shape.keys, np.nan, jnp.dtype(shape.dtype)),
            packed([lane.v for lane in lanes], shape.keys, np.nan, jnp.dtype(shape.dtype)),
            pages,
            LAYER,
            sight,
            None if sinks is None else jnp.asarray(sinks),
        )
        # Interpret mode calls back to Python: what it waits for must not wait for a thread that it holds.
        return jax.block_until_ready(made)

    return Case(shape=shape, arguments=arguments, lanes=lanes)
