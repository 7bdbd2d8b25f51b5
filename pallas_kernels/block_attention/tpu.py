"""Attention of blocks as Mosaic kernels for TPU: how they are called. Scores have keys on sublanes and queries on
lanes, so that what there is one of per query fills registers, in the kernel as in memory."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from pallas_kernels.block_attention import tpu_kernel
from pallas_kernels.block_attention.layout import Laid, Rules

_PARAMS = pltpu.CompilerParams(
    dimension_semantics=("parallel", "parallel", "parallel", "arbitrary"), vmem_limit_bytes=64 * 2**20
)


@functools.partial(jax.jit, static_argnames=("rules", "interpret"))
def forward(
    laid: Laid, rules: Rules, *, interpret: Any = False
) -> tuple[
    Float[Array, "rows kv_heads tiles queries value_size"], Float[Array, "rows kv_heads tiles queries"]
]:
    """See `reference.forward`; `interpret` is that of `pallas_call`."""
    specs = _Specs(laid)
    rows, kv_heads, tiles, queries, _ = laid.q.shape
    value_size = laid.v.shape[-1]
    out, logsumexp = pl.pallas_call(
        functools.partial(tpu_kernel.forward, scale=rules.scale),
        name="attend_blocks",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, kv_heads, tiles, specs.context_tiles),
            in_specs=specs.of_operands(rules),
            out_specs=[specs.of_tile(laid.q, value_size), specs.of_query()],
            scratch_shapes=[
                pltpu.VMEM((1, queries), jnp.float32),
                pltpu.VMEM((1, queries), jnp.float32),
                pltpu.VMEM((value_size, queries), jnp.float32),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((rows, kv_heads, tiles, queries, value_size), laid.q.dtype),
            jax.ShapeDtypeStruct((rows, kv_heads, tiles, 1, queries), jnp.float32),
        ],
        compiler_params=_PARAMS,
        cost_estimate=_cost(laid, 2),
        interpret=interpret,
    )(*specs.seen, *_operands(laid, rules))
    return out, logsumexp[:, :, :, 0]


@functools.partial(jax.jit, static_argnames=("rules", "interpret"))
def backward(
    laid: Laid,
    rules: Rules,
    logsumexp: Float[Array, "rows kv_heads tiles queries"],
    delta: Float[Array, "rows kv_heads tiles queries"],
    d_out: Float[Array, "rows kv_heads tiles queries value_size"],
    *,
    interpret: Any = False,
) -> tuple[Array, Array, Array, Array, Array]:
    """See `reference.backward`; one kernel goes along the queries, the other one along the context."""
    specs = _Specs(laid)
    rows, kv_heads, tiles, queries, head_size = laid.q.shape
    width = laid.tile_tokens
    logsumexp, delta = logsumexp[:, :, :, None], delta[:, :, :, None]
    like = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (laid.q, laid.k, laid.v)]
    d_q, d_k, d_v = pl.pallas_call(
        functools.partial(tpu_kernel.backward_of_blocks, scale=rules.scale),
        name="attend_blocks_backward",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(rows, kv_heads, tiles, specs.context_tiles),
            in_specs=[
                *specs.of_operands(rules),
                specs.of_query(),
                specs.of_query(),
                specs.of_tile(d_out),
            ],
            out_specs=[specs.of_tile(x) for x in (laid.q, laid.k, laid.v)],
            scratch_shapes=[pltpu.VMEM((head_size, queries), jnp.float32)],
        ),
        out_shape=like,
        compiler_params=_PARAMS,
        cost_estimate=_cost(laid, 3),
        interpret=interpret,
    )(*specs.seen, *_operands(laid, rules), logsumexp, delta, d_out)
    along = _Along(laid)
    d_k_context, d_v_context = pl.pallas_call(
        functools.partial(tpu_kernel.backward_of_context, scale=rules.scale),
        name="attend_blocks_backward_of_context",
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=4,
            grid=(rows, kv_heads, specs.context_tiles, tiles),
            in_specs=[
                along.of_tile(laid.q),
                *(along.of_context(x) for x in (laid.k_context, laid.v_context)),
                along.limits(),
                along.of_query(),
                along.of_query(),
                along.of_tile(d_out),
            ],
            out_specs=[along.of_context(x) for x in (laid.k_context, laid.v_context)],
            scratch_shapes=[
                pltpu.VMEM((width, x.shape[-1]), jnp.float32) for x in (laid.k_context, laid.v_context)
            ],
        ),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (laid.k_context, laid.v_context)],
        compiler_params=_PARAMS,
        cost_estimate=_cost(laid, 4),
        interpret=interpret,
    )(
        *specs.seen,
        *along.seen,
        laid.q,
        laid.k_context,
        laid.v_context,
        _limits(laid),
        logsumexp,
        delta,
        d_out,
    )
    return d_q, d_k, d_v, d_k_context, d_v_context


class _Specs:
    """Blocks of operands where the grid is (rows, kv heads, tiles, tiles of the context that a tile sees)."""

    def __init__(self, laid: Laid):
        self.laid = laid
        self.context_tiles = laid.k_context.shape[2] // laid.tile_tokens
        self.seen = laid.seen_tiles()

    def of_operands(self, rules: Rules) -> list[pl.BlockSpec]:
        """Of what both kernels along the queries read."""
        laid = self.laid
        return [
            self.inside(rules),
            *(self.of_tile(x) for x in (laid.q, laid.k, laid.v)),
            *(self.of_context(x) for x in (laid.k_context, laid.v_context)),
            self.limits(),
        ]

    def inside(self, rules: Rules) -> pl.BlockSpec:
        """The mask inside blocks: always the same."""
        return pl.BlockSpec((rules.tile_rows, self.laid.q.shape[3]), lambda r, h, t, i, *_: (0, 0))

    def of_tile(self, array: Array, size: int | None = None) -> pl.BlockSpec:
        """Rows of one tile."""
        shape = (None, None, None, array.shape[3], size or array.shape[-1])
        return pl.BlockSpec(shape, lambda r, h, t, i, *_: (r, h, t, 0, 0))

    def of_query(self) -> pl.BlockSpec:
        """One number per query."""
        shape = (None, None, None, 1, self.laid.q.shape[3])
        return pl.BlockSpec(shape, lambda r, h, t, i, *_: (r, h, t, 0, 0))

    def limits(self) -> pl.BlockSpec:
        """The first context token that a query sees, and the one past the last."""
        return pl.BlockSpec((None, None, 2, self.laid.q.shape[3]), lambda r, h, t, i, *_: (r, t, 0, 0))

    def of_context(self, array: Array) -> pl.BlockSpec:
        """A tile of the context; past those that are seen the last one stays, and is not copied again."""

        def at(r: Any, h: Any, t: Any, i: Any, first: Any, end: Any) -> tuple[Any, ...]:
            last = jnp.maximum(end[r, t] - 1, 0)
            return r, h, jnp.minimum(first[r, t] + i, last), 0

        return pl.BlockSpec((None, None, self.laid.tile_tokens, array.shape[-1]), at)


class _Along:
    """The same where the grid is (rows, kv heads, tiles of the context, tiles that see one)."""

    def __init__(self, laid: Laid):
        self.laid = laid
        first, end = laid.seen_tiles()
        tiles = first.shape[1]
        number = jnp.arange(laid.k_context.shape[2] // laid.tile_tokens)[None, :, None]
        sees = (first[:, None] <= number) & (number < end[:, None])
        tile = jnp.arange(tiles, dtype=jnp.int32)[None, None]
        self.seen = (
            jnp.min(jnp.where(sees, tile, tiles - 1), axis=2),
            jnp.max(jnp.where(sees, tile + 1, 0), axis=2),
        )

    def _tile(self, r: Any, c: Any, i: Any, first: Any, end: Any) -> Any:
        return jnp.minimum(first[r, c] + i, jnp.maximum(end[r, c] - 1, first[r, c]))

    def of_tile(self, array: Array) -> pl.BlockSpec:
        """Rows of one tile."""
        return pl.BlockSpec(
            (None, None, None, array.shape[3], array.shape[-1]),
            lambda r, h, c, i, _, __, first, end: (r, h, self._tile(r, c, i, first, end), 0, 0),
        )

    def of_query(self) -> pl.BlockSpec:
        """One number per query."""
        return pl.BlockSpec(
            (None, None, None, 1, self.laid.q.shape[3]),
            lambda r, h, c, i, _, __, first, end: (r, h, self._tile(r, c, i, first, end), 0, 0),
        )

    def limits(self) -> pl.BlockSpec:
        """As in `_Specs`."""
        return pl.BlockSpec(
            (None, None, 2, self.laid.q.shape[3]),
            lambda r, h, c, i, _, __, first, end: (r, self._tile(r, c, i, first, end), 0, 0),
        )

    def of_context(self, array: Array) -> pl.BlockSpec:
        """One tile of the context."""
        return pl.BlockSpec(
            (None, None, self.laid.tile_tokens, array.shape[-1]), lambda r, h, c, i, *_: (r, h, c, 0)
        )


def _operands(laid: Laid, rules: Rules) -> tuple[Array, ...]:
    """Of the kernels along the queries, as `_Specs.of_operands` has them."""
    return _inside(laid, rules), laid.q, laid.k, laid.v, laid.k_context, laid.v_context, _limits(laid)


def _inside(laid: Laid, rules: Rules) -> Array:
    """[keys, queries] of a tile, 1 where seen."""
    group = laid.q.shape[3] // rules.tile_rows
    return jnp.asarray(np.tile(rules.inside().T, (1, group)).astype(np.int32))


def _limits(laid: Laid) -> Array:
    return jnp.stack([laid.first, laid.end], axis=2)


def _cost(laid: Laid, products: int) -> pl.CostEstimate:
    rows, kv_heads, tiles, queries, head_size = laid.q.shape
    pairs = rows * kv_heads * tiles * queries * laid.k_context.shape[2]
    operands = (laid.q, laid.k, laid.v, laid.k_context, laid.v_context)
    return pl.CostEstimate(
        flops=2 * products * pairs * head_size,
        transcendentals=pairs,
        bytes_accessed=2 * sum(x.size * x.dtype.itemsize for x in operands),
    )
