"""attend against a dense oracle, and what must never reach its output."""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import LAYER, LAYERS, Case, Shape, cases
from dense_oracle import Lane, causal_mask, dense, pack_bits
from hypothesis import given, settings

from pallas_kernels.attention.api import attend
from pallas_kernels.attention.pages import Pages, allocate
from pallas_kernels.attention.sight import Sight, block_sight, causal_sight
from pallas_kernels.commit.api import commit_rows

HEAD_SIZE = 4

SHAPES = [
    Shape(lanes=1, queries=1, keys=1, max_queries=1, max_keys=1, columns=4, page_size=4, kv_heads=3, group=3, words=0),
    Shape(lanes=1, queries=5, keys=5, max_queries=5, max_keys=5, columns=3, page_size=8, kv_heads=1, group=2, words=1),
    Shape(lanes=3, queries=3, keys=3, max_queries=1, max_keys=1, columns=16, page_size=1, kv_heads=2, group=1, words=0),
    Shape(
        lanes=4, queries=9, keys=9, max_queries=6, max_keys=6, columns=5, page_size=3, kv_heads=2, group=2, words=1,
        sinks=True,
    ),
    Shape(
        lanes=3, queries=7, keys=41, max_queries=4, max_keys=36, columns=4, page_size=4, kv_heads=2, group=3, words=2,
        softcap=1.5,
    ),
    Shape(
        lanes=2, queries=6, keys=8, max_queries=6, max_keys=8, columns=2, page_size=8, kv_heads=1, group=4, words=1,
        softcap=0.8, sinks=True,
    ),
]  # fmt: skip


@functools.cache
def program(shape: Shape):
    def run(q, k, v, pages, layer, sight, sinks):
        return attend(
            q,
            k,
            v,
            pages,
            layer,
            sight,
            scale=shape.scale,
            softcap=shape.softcap,
            sinks=sinks,
            return_logsumexp=True,
        )

    return jax.jit(run)


@settings(max_examples=120, deadline=None)
@given(cases(SHAPES))
def test_equals_dense_softmax_and_nothing_of_the_padding_leaks(case: Case):
    for got, expected in zip(program(case.shape)(*case.arguments()), case.expected(), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def simple(
    lanes: int = 1, nodes: int = 2, context: int = 5, seed: int = 0, heads: int = 2, page_size: int = 4
) -> tuple[jax.Array, jax.Array, jax.Array, Pages, int, Sight]:
    """q, k, v, pages, layer, sight of equal causal lanes on 2 pages each."""
    rng = np.random.default_rng(seed)
    pages = allocate(
        num_layers=LAYERS, num_pages=2 * lanes, page_size=page_size, num_kv_heads=1, head_size=HEAD_SIZE, dtype=jnp.float32
    )  # fmt: skip
    table = jnp.arange(2 * lanes, dtype=jnp.int32).reshape(lanes, 2)
    rows = jnp.asarray(rng.normal(size=(2, LAYERS, lanes * context, 1, HEAD_SIZE)), jnp.float32)
    path = jnp.arange(lanes * context, dtype=jnp.int32).reshape(lanes, context)
    pages = commit_rows(pages, *rows, path, table, jnp.zeros(lanes, jnp.int32))
    offsets = jnp.arange(lanes + 1, dtype=jnp.int32) * nodes
    lengths = jnp.full((lanes,), context, jnp.int32)
    sight = causal_sight(offsets, table, lengths, jnp.zeros(lanes * nodes, jnp.int32), max_queries=nodes)
    q = jnp.asarray(rng.normal(size=(lanes * nodes, heads, HEAD_SIZE)), jnp.float32)
    k, v = jnp.asarray(rng.normal(size=(2, lanes * nodes, 1, HEAD_SIZE)), jnp.float32)
    return q, k, v, pages, LAYER, sight


def test_equal_scores_average_what_is_seen():
    pages = allocate(num_layers=1, num_pages=2, page_size=2, num_kv_heads=1, head_size=1, dtype=jnp.float32)
    table, lengths = jnp.array([[1, 0]], jnp.int32), jnp.array([3], jnp.int32)
    v = jnp.array([1.0, 2.0, 3.0]).reshape(1, 3, 1, 1)
    pages = commit_rows(pages, 0 * v, v, jnp.array([[0, 1, 2]], jnp.int32), table, 0 * lengths)
    new = jnp.array([6.0, 13.0]).reshape(2, 1, 1)
    positions = jnp.array([3, 4], jnp.int32)
    build = functools.partial(
        causal_sight, jnp.array([0, 2], jnp.int32), table, lengths, positions, max_queries=2
    )
    for window, expected in ((None, [3, 5]), (3, [11 / 3, 22 / 3]), (1, [6, 13])):
        out = attend(jnp.ones((2, 1, 1)), 0 * new, new, pages, 0, build(window=window), scale=1.0)
        np.testing.assert_allclose(out[:, 0, 0], expected, rtol=1e-6)


def test_a_query_that_sees_nothing_returns_zero():
    q, k, v, pages, layer, sight = simple(context=5)
    blind = dataclasses.replace(sight, first_visible=jnp.full((2,), 100, jnp.int32))
    out, logsumexp = attend(q, k, v, pages, layer, blind, scale=1.0, return_logsumexp=True)
    np.testing.assert_array_equal(out, np.zeros_like(out))
    np.testing.assert_array_equal(logsumexp, np.full((2, 2), -np.inf))


def test_parts_merge_by_their_log_sum_exp():
    q, k, v, pages, layer, sight = simple(nodes=3, context=6)
    context = dataclasses.replace(
        sight, causal=jnp.zeros(1, bool), visible=jnp.zeros((3, 1), jnp.int32)
    )  # no bit: only the context
    in_flight = dataclasses.replace(sight, context_lengths=jnp.zeros(1, jnp.int32))
    parts = [attend(q, k, v, pages, layer, s, scale=1.0, return_logsumexp=True) for s in (context, in_flight)]
    whole, whole_logsumexp = attend(q, k, v, pages, layer, sight, scale=1.0, return_logsumexp=True)
    logsumexp = jnp.logaddexp(parts[0][1], parts[1][1])
    merged = sum(out * jnp.exp(part - logsumexp)[..., None] for out, part in parts)
    np.testing.assert_allclose(logsumexp, whole_logsumexp, rtol=1e-5)
    np.testing.assert_allclose(merged, whole, rtol=1e-5)


def test_a_lane_s_nan_is_seen_there_and_nowhere_else():
    q, k, v, pages, layer, sight = simple(lanes=3)
    clean = attend(q, k, v, pages, layer, sight, scale=1.0)
    for broken in (
        (q, k.at[2].set(jnp.nan), v, pages),
        (q, k, v.at[2].set(jnp.nan), pages),
        (q.at[2:4].set(jnp.nan), k, v, pages),
        (q, k, v, dataclasses.replace(pages, stored_v=pages.stored_v.at[:, 2].set(jnp.nan))),
    ):
        out = attend(*broken, layer, sight, scale=1.0)
        assert np.isnan(out[2:4]).all()
        np.testing.assert_array_equal(np.delete(out, [2, 3], 0), np.delete(clean, [2, 3], 0))


def test_blocks_see_all_of_themselves():
    q, k, v, pages, layer, sight = simple(lanes=2, nodes=3)
    block = block_sight(
        sight.query_offsets, sight.page_table, sight.context_lengths, sight.first_visible, max_queries=3
    )
    out = attend(q, k, v, pages, layer, block, scale=1.0)
    causal = attend(q, k, v, pages, layer, sight, scale=1.0)
    np.testing.assert_allclose(out[2::3], causal[2::3], rtol=1e-5)
    order = jnp.array([2, 0, 1, 3, 4, 5])  # who stands where in a block does not matter
    np.testing.assert_allclose(attend(q, k[order], v[order], pages, layer, block, scale=1.0), out, rtol=1e-5)


@pytest.mark.parametrize("causal", [True, False])
def test_a_chunk_longer_than_a_block_of_keys(causal):
    nodes, rng = 300, np.random.default_rng(1)
    q, k, v, pages, layer, sight = simple(nodes=nodes, context=7, heads=1)
    first = np.zeros(nodes, np.int32)
    sees = causal_mask(nodes, nodes, 7, first) if causal else rng.random((nodes, nodes)) < 0.1
    if not causal:
        visible = jnp.asarray(pack_bits(sees, 10))
        sight = dataclasses.replace(sight, causal=jnp.zeros(1, bool), visible=visible)
    rows = [leaf[LAYER] for leaf in (pages.k.swapaxes(-1, -2), pages.v)]
    context_k, context_v = (np.asarray(leaf).reshape(-1, 1, HEAD_SIZE)[:7] for leaf in rows)
    lane = Lane(
        q=np.asarray(q),
        context_k=context_k,
        context_v=context_v,
        k=np.asarray(k),
        v=np.asarray(v),
        first_visible=first,
        sees=sees,
    )
    out = attend(q, k, v, pages, layer, sight, scale=1.0)
    np.testing.assert_allclose(out, dense(lane, scale=1.0)[0], rtol=1e-4, atol=1e-5)


def test_context_alone_can_be_attended():
    q, k, v, pages, layer, sight = simple(nodes=2, context=6)
    without = dataclasses.replace(sight, key_offsets=jnp.zeros(2, jnp.int32), max_keys=0)
    blank = dataclasses.replace(sight, causal=jnp.zeros(1, bool), visible=jnp.zeros((2, 1), jnp.int32))
    np.testing.assert_allclose(
        attend(q, k[:0], v[:0], pages, layer, without, scale=1.0),
        attend(q, k, v, pages, layer, blank, scale=1.0),
        rtol=1e-6,
    )


def test_the_layer_may_be_traced():
    q, k, v, pages, _, sight = simple()
    run = jax.jit(lambda layer: attend(q, k, v, pages, layer, sight, scale=1.0))
    for layer in range(LAYERS):
        np.testing.assert_allclose(
            run(jnp.int32(layer)), attend(q, k, v, pages, layer, sight, scale=1.0), rtol=1e-6
        )


def test_narrow_dtypes_are_widened_inside():
    q, k, v, pages, layer, sight = simple(nodes=3)
    narrow = [array.astype(jnp.bfloat16) for array in (q, k, v)]
    out = attend(*narrow, pages_of(pages, jnp.bfloat16), layer, sight, scale=1.0)
    wide = [array.astype(jnp.float32) for array in narrow]
    rounded = pages_of(pages_of(pages, jnp.bfloat16), jnp.float32)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(out, attend(*wide, rounded, layer, sight, scale=1.0).astype(jnp.bfloat16))


def pages_of(pages: Pages, dtype) -> Pages:
    """The same numbers in another dtype."""
    stored = jnp.uint16 if dtype == jnp.bfloat16 else dtype
    return Pages(stored_k=pages.k.astype(dtype).view(stored), stored_v=pages.v.astype(dtype).view(stored))


@pytest.mark.optimized
@pytest.mark.parametrize("lanes", [1, 3])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_narrow_pool_is_never_widened_as_a_whole(dtype, lanes):
    q, k, v, pages, layer, sight = simple(lanes=lanes, nodes=2)
    narrow = [array.astype(dtype) for array in (q, k, v)]
    large = jax.tree.map(lambda leaf: jnp.tile(leaf, (1, 64, 1, 1, 1)), pages_of(pages, jnp.dtype(dtype)))
    text = (
        jax.jit(functools.partial(attend, scale=1.0)).lower(*narrow, large, layer, sight).compile().as_text()
    )
    assert not pool_sized(text, "f32", large)


def pool_sized(text: str, element: str, pages: Pages) -> list[str]:
    """Arrays of a compiled program that have this element type and at least the pool's elements."""
    arrays = re.findall(rf"\b{element}\[([\d,]+)\]", text)
    return [a for a in arrays if math.prod(map(int, a.split(","))) >= pages.stored_k.size]


@pytest.mark.optimized
def test_memory_does_not_grow_with_the_page_table_and_the_pool_is_not_copied():
    q, k, v, pages, layer, sight = simple()
    temporary = []
    for columns in (2, 512):
        table = jnp.zeros((1, columns), jnp.int32)
        large = jax.tree.map(lambda leaf, n=columns: jnp.tile(leaf, (1, n, 1, 1, 1)), pages)
        wide = dataclasses.replace(sight, page_table=table)
        compiled = jax.jit(functools.partial(attend, scale=1.0)).lower(q, k, v, large, layer, wide).compile()
        temporary.append(compiled.memory_analysis().temp_size_in_bytes)
        shapes = [f"f32[{','.join(map(str, leaf.shape))}]" for leaf in (large.k, large.v)]
        copies = [line for line in compiled.as_text().splitlines() if " copy(" in line]
        assert not [line for line in copies if any(shape in line for shape in shapes)]
    assert temporary[0] == temporary[1]


def test_what_does_not_fit_is_refused():
    q, k, v, pages, layer, sight = simple()
    run = functools.partial(attend, scale=1.0)
    with pytest.raises(ValueError, match=r"implementation: expected None, .* or .gpu., got 'cuda'"):
        run(q, k, v, pages, layer, sight, implementation="cuda")
    with pytest.raises(ValueError, match="layer: expected 0 to 1, got 2"):
        run(q, k, v, pages, 2, sight)
    two_kv_heads = jnp.concatenate([k, k], axis=1)
    with pytest.raises(ValueError, match=r"k_new: expected \[keys, 1, 4\], got \[2, 2, 4\]"):
        run(q, two_kv_heads, two_kv_heads, pages, layer, sight)
    with pytest.raises(ValueError, match="sight: expected 1 queries, got 2"):
        run(q[:1], k, v, pages, layer, sight)
    with pytest.raises(ValueError, match="q: expected at least one query"):
        run(q[:0], k, v, pages, layer, sight)
    narrow = dataclasses.replace(sight, visible=jnp.zeros((2, 1), jnp.int32), max_keys=33)
    with pytest.raises(ValueError, match=r"sight: expected words for 33 keys \(max_keys\), got 1 words"):
        run(q, k, v, pages, layer, narrow)
