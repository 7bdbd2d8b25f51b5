"""Times attention and commits on this machine: `python benchmarks/attention.py`.

Each row is what one step of a 30-layer model spends there: `attend` called once per layer in one
program, all layers in one pool. The pool is larger than the caches, so reading it costs what it costs
in a real step. Minimum over repeats; compilation apart.
"""

import dataclasses
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.attention.api import attend
from pallas_kernels.attention.pages import Pages, allocate
from pallas_kernels.attention.shapes import DECODE, PREFILL, AttentionShape
from pallas_kernels.attention.sight import Sight, causal_sight
from pallas_kernels.commit.api import commit_rows

LAYERS = 30
PAGE_SIZES = (64, 128, 256)
REPEATS = 40


def pool(shape: AttentionShape) -> tuple[Pages, jax.Array]:
    """A pool and a page table whose pages lie in random order."""
    columns = -(-shape.capacity // shape.page_size)
    pages = allocate(
        num_layers=LAYERS,
        num_pages=shape.lanes * columns,
        page_size=shape.page_size,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=jnp.float32,
    )
    table = np.random.default_rng(0).permutation(shape.lanes * columns).reshape(shape.lanes, columns)
    return pages, jnp.asarray(table, jnp.int32)


def milliseconds(run: Callable[[], object]) -> float:
    """The shortest of REPEATS calls."""
    jax.block_until_ready(run())
    shortest = float("inf")
    for _ in range(REPEATS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest * 1e3


def time_attend(shape: AttentionShape) -> tuple[float, float]:
    """Milliseconds of a step's attention, and seconds to compile it."""
    pages, table = pool(shape)
    nodes = shape.lanes * shape.nodes
    offsets = jnp.arange(shape.lanes + 1, dtype=jnp.int32) * shape.nodes
    lengths = jnp.full((shape.lanes,), shape.context, jnp.int32)
    sight = causal_sight(
        offsets, table, lengths, jnp.zeros((nodes,), jnp.int32), max_queries=nodes - shape.lanes + 1
    )
    q = jnp.ones((nodes, shape.heads, shape.head_size))
    k = jnp.ones((nodes, shape.kv_heads, shape.head_size))

    def step(q: jax.Array, k: jax.Array, pages: Pages, sight: Sight) -> jax.Array:
        for layer in range(LAYERS):
            q = q + attend(q, k, k, pages, layer, sight, scale=shape.head_size**-0.5)
        return q

    begin = time.perf_counter()
    compiled = jax.jit(step).lower(q, k, pages, sight).compile()
    compile_seconds = time.perf_counter() - begin
    return milliseconds(lambda: compiled(q, k, pages, sight)), compile_seconds


def time_commit(shape: AttentionShape) -> float:
    """Milliseconds to commit all nodes of a round, in place."""
    pages, table = pool(shape)
    nodes = shape.lanes * shape.nodes
    rows = jnp.ones((LAYERS, nodes, shape.kv_heads, shape.head_size))
    path = jnp.arange(nodes, dtype=jnp.int32).reshape(shape.lanes, shape.nodes)
    lengths = jnp.full((shape.lanes,), shape.context, jnp.int32)
    commit = jax.jit(commit_rows, donate_argnums=0)

    def run() -> Pages:
        nonlocal pages
        pages = commit(pages, rows, rows, path, table, lengths)
        return pages

    return milliseconds(run)


def main() -> None:
    """Prints one line per shape and page size."""
    print(f"{'shape':20}{'page size':>10}{'attend ms':>11}{'commit ms':>11}{'compile s':>11}")
    for name, shape in (DECODE | PREFILL).items():
        for page_size in PAGE_SIZES:
            sized = dataclasses.replace(shape, page_size=page_size)
            attend_ms, compile_seconds = time_attend(sized)
            commit_ms = time_commit(sized)
            print(
                f"{name:20}{page_size:10}{attend_ms:11.2f}{commit_ms:11.2f}{compile_seconds:11.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
