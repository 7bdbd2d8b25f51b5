"""Checks and times the kernels on an NVIDIA GPU, in one short run: `python benchmarks/gpu.py`.

1. Attention, plain XLA and the Mosaic GPU kernel, against plain XLA with queries and in-flight keys in float32.
2. Tempering of the vocabulary's rows, plain XLA and the Mosaic GPU kernel, against plain XLA on the CPU.
3. Their time per call, beside the time that a large copy takes for as many bytes.
4. Plain and speculative decoding of a Qwen3-shaped target of random weights; accept lengths are simulated.

`--tiny` runs the same on small shapes; without a GPU the kernels are interpreted there, and no time means anything.
What fails is printed and the rest goes on; the exit status is then 1.
"""

import argparse
import dataclasses
import functools
import sys
import time
import traceback
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.decode import Method, Models
from jspec.drafters.plain import plain
from jspec.drafters.simulated import simulated
from jspec.engine import Engine
from jspec.settings import Settings
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves
from jspec.targets.rope import Rope
from pallas_kernels.attention import gpu, reference
from pallas_kernels.attention.pages import allocate
from pallas_kernels.attention.shapes import COMPILED, CompiledShape
from pallas_kernels.attention.sight import causal_sight, tree_sight
from pallas_kernels.vocabulary_row import gpu as row_gpu
from pallas_kernels.vocabulary_row import reference as row_reference
from pallas_kernels.vocabulary_row.shapes import COMPILED as ROW_COMPILED
from pallas_kernels.vocabulary_row.shapes import CompiledShape as RowShape

REPEATS = 20
TOLERANCE = 3e-2  # bfloat16 weights of the softmax, values of size 1
SHAPES = {
    name: dataclasses.replace(COMPILED[name], layers=2, sinks=False)
    for name in ("chain", "tree", "tree of 64")
}
TINY = {
    "tree": CompiledShape(slots=2, nodes=3, context=128, heads=4, kv_heads=2, head_size=64, layers=2, words=1)
}
ROW_TOLERANCE = 1e-4  # logits of size 10, a row's sum in another order
ROW_SHAPES = {name: ROW_COMPILED[name] for name in ("nodes", "plain", "odd")}
TINY_ROWS = {"odd": RowShape(rows=5, vocabulary=4501)}

# Qwen3-1.7B's sizes.
QWEN3 = DecoderConfig(
    architecture="qwen3",
    vocab_size=151936,
    hidden_size=2048,
    intermediate_size=6144,
    num_layers=28,
    num_heads=16,
    num_kv_heads=8,
    head_size=128,
    norm_eps=1e-6,
    max_context=4096,
    full_rope=Rope(theta=1e6),
    layer_kinds=("full",) * 28,
    query_key_norm=True,
    tied_head=True,
    query_scale=128**-0.5,
)
TINY_QWEN3 = dataclasses.replace(
    QWEN3, vocab_size=256, hidden_size=32, intermediate_size=48, num_layers=2, num_heads=2, num_kv_heads=1,
    head_size=16, max_context=128, layer_kinds=("full",) * 2,
)  # fmt: skip


def seconds(run: Callable[[], object], repeats: int) -> float:
    """The shortest of some calls, compilation apart."""
    jax.block_until_ready(run())
    shortest = float("inf")
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        shortest = min(shortest, time.perf_counter() - begin)
    return shortest


def arguments(shape: CompiledShape) -> tuple:
    """Of one call of attention: random numbers, pages in random order, full contexts."""
    random = np.random.default_rng(0)
    columns = -(-shape.context // shape.page_size)
    nodes = shape.slots * shape.nodes
    pages = allocate(
        num_layers=shape.layers,
        num_pages=shape.slots * columns,
        page_size=shape.page_size,
        num_kv_heads=shape.kv_heads,
        head_size=shape.head_size,
        dtype=jnp.bfloat16,
    )

    def normal(seed: int, *size: int) -> jax.Array:
        return jax.random.normal(jax.random.key(seed), size, jnp.bfloat16)

    def stored(seed: int, like: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(normal(seed, *like.shape), jnp.uint16)

    pages = dataclasses.replace(pages, stored_k=stored(0, pages.stored_k), stored_v=stored(1, pages.stored_v))
    table = jnp.asarray(random.permutation(shape.slots * columns).reshape(shape.slots, columns), jnp.int32)
    offsets = jnp.arange(shape.slots + 1, dtype=jnp.int32) * shape.nodes
    lengths = jnp.full((shape.slots,), shape.context, jnp.int32)
    positions = jnp.full((nodes,), shape.context, jnp.int32)
    where = offsets, table, lengths, positions
    if shape.words:
        parents = jnp.tile(jnp.arange(shape.nodes, dtype=jnp.int32) // 2 - 1, shape.slots)
        sight = tree_sight(*where, parents, max_queries=shape.nodes)
    else:
        sight = causal_sight(*where, max_queries=shape.nodes)
    q = normal(2, nodes, shape.heads, shape.head_size)
    k, v = (normal(seed, nodes, shape.kv_heads, shape.head_size) for seed in (3, 4))
    return q, k, v, pages, jnp.int32(shape.layers - 1), sight


def copy_bandwidth(size: int, repeats: int) -> float:
    """Bytes per second that a large copy reads and writes together."""
    source = jnp.zeros((size // 4,), jnp.float32)
    copy = jax.jit(lambda x: x + 1)
    return 2 * size / seconds(lambda: copy(source), repeats)


def attention(name: str, shape: CompiledShape, bandwidth: float, repeats: int, interpret: object) -> None:
    """Prints the largest error and the time of each implementation.

    Raises:
      ValueError: an implementation is wrong.
    """
    made = arguments(shape)
    scale = shape.head_size**-0.5
    calls = {
        "xla": jax.jit(
            lambda q, k, v, pages, layer, sight: reference.attend(
                q, k, v, pages, layer, sight, scale, None, None
            )[0]
        ),
        "gpu": jax.jit(
            lambda q, k, v, pages, layer, sight: gpu.attend(
                q, k, v, pages, layer, sight, scale, None, None, interpret=interpret
            )[0]
        ),
    }
    exact = jax.tree.map(lambda a: a.astype(jnp.float32) if a.dtype == jnp.bfloat16 else a, made[:3])
    expected = np.asarray(calls["xla"](*exact, *made[3:]))
    read = 2 * shape.slots * shape.context * shape.kv_heads * shape.head_size * 2
    wrong = []
    for implementation, call in calls.items():
        error = float(np.max(np.abs(np.asarray(call(*made), np.float32) - expected)))
        spent = seconds(lambda call=call: call(*made), repeats)
        print(
            f"attention, {name}, {implementation}: error {error:.1e}, {spent * 1e6:.0f} us; "
            f"the ceiling by bandwidth is {read / bandwidth * 1e6:.0f} us",
            flush=True,
        )
        if not error <= TOLERANCE:
            wrong.append(implementation)
    if wrong:
        raise ValueError(f"attention, {name}: expected errors up to {TOLERANCE}, got more from {wrong}")


def rows_to_temper(shape: RowShape, filtered: bool) -> tuple:
    """Of one call of `temper`: random logits and coins; of four rows one is greedy, the others may be filtered."""
    random = np.random.default_rng(0)
    number = np.arange(shape.rows)
    temperature = np.where(number % 4 == 3, 0.0, 0.8)
    top_k = np.where(number % 2 == 0, 50, 0) * filtered
    top_p = np.where(number % 4 == 0, 1.0, 0.95) if filtered else np.ones(shape.rows)
    min_p = np.where(number % 4 == 2, 0.02, 0.0) * filtered
    settings = [
        jnp.asarray(column, kind)
        for column, kind in zip((temperature, top_k, top_p, min_p), "fiff", strict=True)
    ]
    coins = [jnp.asarray(random.random(shape.rows), jnp.float32)] if shape.draws else []
    return jnp.asarray(3 * random.normal(size=(shape.rows, shape.vocabulary)), jnp.float32), *settings, *coins


def tempering(
    name: str, shape: RowShape, filtered: bool, bandwidth: float, repeats: int, interpret: object
) -> None:
    """Prints the largest error of logits and normalisers, how many floors and draws are others, and the time.

    A floor or a draw is another where a share or a coin falls between two roundings of a sum: few may be.

    Raises:
      ValueError: an implementation is wrong.
    """
    made = rows_to_temper(shape, filtered)
    plain_xla = jax.jit(lambda *a: row_reference.temper(*a, *(() if shape.draws else (None,))))
    calls = {"xla": plain_xla, "gpu": jax.jit(lambda *a: row_gpu.temper(*a, interpret=interpret))}
    with jax.default_device(jax.devices("cpu")[0]):
        expected = jax.tree.map(np.asarray, plain_xla(*jax.device_put(made, jax.devices("cpu")[0])))
    moved = 2 * 4 * shape.rows * shape.vocabulary
    kind = "filtered" if filtered else "unfiltered"
    wrong = []
    for implementation, call in calls.items():
        got = jax.tree.map(np.asarray, call(*made))
        error = max(
            float(np.max(np.abs(a - b)))
            for a, b in ((got.logits, expected.logits), (got.log_normaliser, expected.log_normaliser))
        )
        floors = int(np.sum(~np.isclose(got.floor, expected.floor, rtol=0, atol=1e-5)))
        draws = int(np.sum(got.drawn != expected.drawn)) if shape.draws else 0
        spent = seconds(lambda call=call: call(*made), repeats)
        print(
            f"tempering, {name}, {kind}, {implementation}: error {error:.1e}, of {shape.rows} rows "
            f"{floors} floors and {draws} draws differ, {spent * 1e6:.0f} us; the ceiling by bandwidth is {moved / bandwidth * 1e6:.0f} us",
            flush=True,
        )
        if not error <= ROW_TOLERANCE or max(floors, draws) > 1 + shape.rows // 8:
            wrong.append(implementation)
    if wrong:
        raise ValueError(
            f"tempering, {name}: expected errors up to {ROW_TOLERANCE} and few other floors or draws, "
            f"got more from {wrong}"
        )


def decoding(config: DecoderConfig, slots: int, tokens: int, dtype: jnp.dtype) -> None:
    """Prints tokens per second, plain and with drafts of which 3 of 7 are accepted."""
    leaves = decoder_leaves(config, dtype)
    weights = tuple(
        jnp.ones(leaf.shape, leaf.dtype)
        if "norm" in leaf.path
        else (0.02 * jax.random.normal(jax.random.key(i), leaf.shape)).astype(leaf.dtype)
        for i, leaf in enumerate(leaves)
    )
    settings = Settings(max_tokens=tokens, ignore_eos=True)
    prompts = [[1 + i, 2, 3, 4, 5, 6, 7] for i in range(slots)]
    for drafter in (plain(), simulated(draft_length=7, mean_accept_length=3)):
        engine = Engine(
            method=Method(target=DecoderTarget(config=config), drafter=drafter),
            models=Models(target=weights, drafter=()),
            max_slots=slots,
            max_context=config.max_context,
            cache_dtype=dtype,
            chunks=(31,),
        )
        engine.generate(prompts, settings)
        begin = time.perf_counter()
        results = engine.generate(prompts, settings)
        spent = time.perf_counter() - begin
        emitted = sum(len(result.token_ids) for result in results)
        print(f"decoding, {drafter.name}, {slots} slots: {emitted / spent:.0f} tokens/s", flush=True)


def main(flags: list[str] | None = None) -> int:
    """Runs all parts; returns the exit status."""
    parser = argparse.ArgumentParser(description="Checks and times the kernels on an NVIDIA GPU")
    parser.add_argument(
        "--tiny", action="store_true", help="small shapes; the kernels are interpreted off GPUs"
    )
    tiny = parser.parse_args(flags).tiny
    on_gpu = jax.default_backend() == "gpu"
    if not on_gpu and not tiny:
        raise SystemExit(
            f"device: expected a GPU, got {jax.devices()[0]}; not measured. Pass --tiny for a trial"
        )
    interpret = None if on_gpu else plgpu.InterpretGPUParams()  # pyright: ignore[reportAttributeAccessIssue]
    repeats = 1 if tiny else REPEATS
    bandwidth = copy_bandwidth(2**20 if tiny else 2**32, repeats)
    print(
        f"{jax.devices()[0].device_kind}, jax {jax.__version__}: copies at {bandwidth / 1e9:.0f} GB/s",
        flush=True,
    )
    parts = [
        functools.partial(attention, name, shape, bandwidth, repeats, interpret)
        for name, shape in (TINY if tiny else SHAPES).items()
    ]
    parts += [
        functools.partial(tempering, name, shape, filtered, bandwidth, repeats, interpret)
        for name, shape in (TINY_ROWS if tiny else ROW_SHAPES).items()
        for filtered in (False, True)
    ]
    for slots in (1,) if tiny else (1, 8):
        sizes = (TINY_QWEN3, slots, 12) if tiny else (QWEN3, slots, 256)
        parts.append(functools.partial(decoding, *sizes, jnp.dtype(jnp.float32 if tiny else jnp.bfloat16)))
    failed = 0
    for part in parts:
        try:
            part()
        except Exception:
            failed += 1
            traceback.print_exc()
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
