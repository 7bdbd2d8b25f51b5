"""What is committed is what is read, in place; in plain XLA, and by the TPU kernel in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from race_checks import assert_no_race

from pallas_kernels.attention.pages import Pages, allocate, gather_rows
from pallas_kernels.commit import tpu
from pallas_kernels.commit.api import commit_rows

LAYERS, KV_HEADS, HEAD_SIZE = 2, 2, 3


def pool(num_pages: int, page_size: int, layers: int = LAYERS, dtype=jnp.float32) -> Pages:
    pages = allocate(
        num_layers=layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        dtype=dtype,
    )
    if dtype == jnp.bfloat16:
        return pages
    return jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), pages)


def rows(seed: int, nodes: int, layers: int = LAYERS) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(seed)
    shape = (layers, nodes, KV_HEADS, HEAD_SIZE)
    return tuple(jnp.asarray(rng.normal(size=shape), jnp.float32) for _ in range(2))


def ints(values) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


@functools.cache
def interpreted(races: bool = False):
    params = pltpu.InterpretParams(detect_races=races, dma_execution_mode="eager" if races else "on_wait")
    return functools.partial(tpu.commit_rows, interpret=params)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_committed_rows_are_gathered_back(page_size):
    table = ints(np.random.default_rng(0).permutation(2 * (16 // page_size)).reshape(2, -1))
    pages = pool(table.size, page_size)
    first, second = rows(1, 9), rows(2, 6)
    pages = commit_rows(pages, *first, ints([[3, 1, 4, 8, 0], [2, 7, -1, -1, -1]]), table, ints([0, 0]))
    pages = commit_rows(pages, *second, ints([[5, 0, 1], [2, 4, 3]]), table, ints([5, 2]))
    for layer in range(LAYERS):
        for got, a, b in zip(gather_rows(pages, layer, table, 8), first, second, strict=True):
            np.testing.assert_array_equal(
                got[0], np.concatenate([a[layer][ints([3, 1, 4, 8, 0])], b[layer][ints([5, 0, 1])]])
            )
            np.testing.assert_array_equal(
                got[1, :5], np.concatenate([a[layer][ints([2, 7])], b[layer][ints([2, 4, 3])]])
            )


def test_nothing_else_is_written():
    pages = commit_rows(
        pool(4, 2), *rows(0, 3), ints([[1, -1], [-1, -1]]), ints([[2, 0], [1, 3]]), ints([1, 0])
    )
    for got in gather_rows(pages, 1, ints([[0, 1, 2, 3]]), 8):
        np.testing.assert_array_equal(np.isfinite(got).all((2, 3))[0], [0, 0, 0, 0, 0, 1, 0, 0])


def test_a_ring_keeps_the_newest_rows():
    k, v = rows(0, 7)
    ring = ints([[1, 0, 1, 0]])  # two pages of 2: position p lies where p - 4 lay
    pages = commit_rows(pool(2, 2), k, v, ints([range(7)]), ring, ints([0]))
    got = gather_rows(pages, 0, ring, 7)[0][0]
    np.testing.assert_array_equal(got[3:], k[0, 3:])
    np.testing.assert_array_equal(got[2], k[0, 6])


def test_a_group_without_layers_commits_nothing():
    pages = pool(1, 2, layers=0)
    after = commit_rows(pages, *rows(0, 1, layers=0), ints([[0]]), ints([[0]]), ints([0]))
    assert after.k.shape == (0, 1, KV_HEADS, HEAD_SIZE, 2)


def test_the_pool_s_dtype_is_kept():
    pages = allocate(
        num_layers=1, num_pages=1, page_size=2, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE, dtype=jnp.bfloat16
    )
    k, v = rows(0, 1, layers=1)
    after = commit_rows(pages, k, v, ints([[0]]), ints([[0]]), ints([1]))
    assert pages.dtype == after.dtype == after.k.dtype == after.v.dtype == jnp.bfloat16
    np.testing.assert_array_equal(after.k[0, 0, :, :, 1], k[0, 0].astype(jnp.bfloat16))
    np.testing.assert_array_equal(after.v[0, 0, :, 1], v[0, 0].astype(jnp.bfloat16))
    np.testing.assert_array_equal(after.k[..., 0], jnp.zeros_like(after.k[..., 0]))


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(("commits", "page_size"), [(1, 16), (8, 128)])
def test_a_donated_pool_is_written_in_place(commits, page_size, dtype):
    pages = pool(64, page_size, dtype=jnp.dtype(dtype))
    table, path = ints(np.arange(64).reshape(2, 32)), ints(np.arange(2 * commits).reshape(2, commits))
    compiled = (
        jax.jit(commit_rows, donate_argnums=0)
        .lower(pages, *rows(0, 2 * commits), path, table, ints([3, 9]))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pages.k.nbytes + pages.v.nbytes
    assert memory.temp_size_in_bytes < pages.k.nbytes // 4
    shapes = [f"[{','.join(map(str, leaf.shape))}]" for leaf in (pages.k, pages.v)]
    copies = [line for line in compiled.as_text().splitlines() if " copy(" in line or " convert(" in line]
    assert not [line for line in copies if any(shape in line for shape in shapes)]


def test_sizes_below_one_are_refused():
    with pytest.raises(ValueError, match="page_size: expected at least 1, got 0"):
        allocate(num_layers=1, num_pages=1, page_size=0, num_kv_heads=1, head_size=1, dtype=jnp.float32)


def test_gathering_past_the_table_is_refused():
    with pytest.raises(ValueError, match="capacity: expected at most 4 rows, got 5"):
        gather_rows(pool(2, 2), 0, ints([[0, 1]]), 5)


@pytest.mark.parametrize("races", [False, True])
@pytest.mark.parametrize(
    ("dtype", "platform", "page_size"),
    [("float32", "tpu", 4), ("bfloat16", "cpu", 4), ("bfloat16", "tpu", 256)],
)
def test_the_tpu_kernel_writes_what_the_reference_writes(dtype, platform, page_size, races):
    if races and page_size != 4:
        pytest.skip("nothing new to race")
    layers = 3
    pages = allocate(
        num_layers=layers, num_pages=12, page_size=page_size, num_kv_heads=KV_HEADS, head_size=HEAD_SIZE,
        dtype=dtype, platform=platform,
    )  # fmt: skip
    assert pages.values_by_feature == (platform == "tpu")
    pages = jax.tree.map(
        lambda leaf: (leaf + np.arange(leaf.size).reshape(leaf.shape) % 97).astype(leaf.dtype), pages
    )
    rng = np.random.default_rng(3)
    table = ints(rng.permutation(12).reshape(4, 3))
    nodes = 14
    k, v = rows(5, nodes, layers)
    k, v = (a.astype(dtype).at[:, 13].set(jnp.nan) for a in (k, v))  # node 13 is padding
    # In a row and not, over the edge of a page or window, at its end, nothing, a whole page and more.
    path = ints([[2, 3, 4, -1, -1, -1], [0, 5, 9, 6, -1, -1], [-1] * 6, [7, 8, 9, 10, 11, 12]])
    lengths = ints([2, 5, 4, 3] if page_size == 4 else [126, 253, 4, 506])
    expected = commit_rows(pages, k, v, path, table, lengths)
    got = interpreted(races)(pages, k, v, path, table, lengths)
    if races:
        assert_no_race(got)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    assert np.any(np.asarray(got.stored_k) != np.asarray(pages.stored_k))


def test_an_implementation_that_cannot_be_had_is_refused():
    arguments = rows(0, 1), ints([[0]]), ints([[0]]), ints([0])
    with pytest.raises(ValueError, match="page size that is a multiple of 128"):
        commit_rows(pool(1, 2), *arguments[0], *arguments[1:], implementation="tpu")
    with pytest.raises(ValueError, match="interpret mode"):
        commit_rows(pool(1, 128), *arguments[0], *arguments[1:], implementation="tpu")
    with pytest.raises(ValueError, match="implementation: expected None"):
        commit_rows(pool(1, 128), *arguments[0], *arguments[1:], implementation="gpu")
