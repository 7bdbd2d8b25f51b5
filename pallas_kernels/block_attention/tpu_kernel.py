"""The TPU kernels of `attend_blocks`: one tile of blocks and one of the context at a time.

The first step of a tile also takes its own blocks. Scores are [keys, queries].
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

_LOWEST = -1e30  # see `reference`


def forward(
    first_tile: Any,
    end_tile: Any,
    inside: Any,
    q: Any,
    k: Any,
    v: Any,
    k_context: Any,
    v_context: Any,
    limits: Any,
    out: Any,
    logsumexp: Any,
    maximum: Any,
    total: Any,
    weighted: Any,
    *,
    scale: float,
) -> None:
    """Output and log-sum-exp of a tile, by an online softmax."""
    tile, step = _tile(first_tile)

    @pl.when(step == 0)
    def _() -> None:
        scores = _scores(k[...], q[...], inside[...] > 0, scale)
        top = jnp.max(scores, axis=0, keepdims=True)
        weights = jnp.exp(scores - top)
        maximum[...] = top
        total[...] = jnp.sum(weights, axis=0, keepdims=True)
        weighted[...] = _dot(v[...], weights.astype(v.dtype), 0, 0)

    @pl.when(tile < end_tile[pl.program_id(0), pl.program_id(2)])
    def _() -> None:
        scores = _scores(k_context[...], q[...], _seen(k_context, limits, tile), scale)
        top = jnp.maximum(maximum[...], jnp.max(scores, axis=0, keepdims=True))
        weights, decay = jnp.exp(scores - top), jnp.exp(maximum[...] - top)
        maximum[...] = top
        total[...] = total[...] * decay + jnp.sum(weights, axis=0, keepdims=True)
        weighted[...] = weighted[...] * decay + _dot(v_context[...], weights.astype(v_context.dtype), 0, 0)

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        out[...] = (weighted[...] / total[...]).T.astype(out.dtype)
        logsumexp[...] = maximum[...] + jnp.log(total[...])


def backward_of_blocks(
    first_tile: Any,
    end_tile: Any,
    inside: Any,
    q: Any,
    k: Any,
    v: Any,
    k_context: Any,
    v_context: Any,
    limits: Any,
    logsumexp: Any,
    delta: Any,
    d_out: Any,
    d_q: Any,
    d_k: Any,
    d_v: Any,
    summed: Any,
    *,
    scale: float,
) -> None:
    """Gradients of a tile's queries, and of its own keys and values."""
    tile, step = _tile(first_tile)

    @pl.when(step == 0)
    def _() -> None:
        scores = _scores(k[...], q[...], inside[...] > 0, scale)
        weights, d_scores = _gradients(scores, v[...], logsumexp, delta, d_out, scale)
        d_scores = d_scores.astype(q.dtype)
        summed[...] = _dot(k[...], d_scores, 0, 0)
        d_k[...] = _dot(d_scores, q[...], 1, 0).astype(d_k.dtype)
        d_v[...] = _dot(weights.astype(d_out.dtype), d_out[...], 1, 0).astype(d_v.dtype)

    @pl.when(tile < end_tile[pl.program_id(0), pl.program_id(2)])
    def _() -> None:
        scores = _scores(k_context[...], q[...], _seen(k_context, limits, tile), scale)
        _, d_scores = _gradients(scores, v_context[...], logsumexp, delta, d_out, scale)
        summed[...] += _dot(k_context[...], d_scores.astype(q.dtype), 0, 0)

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        d_q[...] = summed[...].T.astype(d_q.dtype)


def backward_of_context(
    first_tile: Any,
    end_tile: Any,
    first_seeing: Any,
    end_seeing: Any,
    q: Any,
    k_context: Any,
    v_context: Any,
    limits: Any,
    logsumexp: Any,
    delta: Any,
    d_out: Any,
    d_k: Any,
    d_v: Any,
    summed_k: Any,
    summed_v: Any,
    *,
    scale: float,
) -> None:
    """Gradients of a tile of the context, over all tiles of blocks that see some of it."""
    row, tile, step = pl.program_id(0), pl.program_id(2), pl.program_id(3)

    @pl.when(step == 0)
    def _() -> None:
        summed_k[...] = jnp.zeros_like(summed_k)
        summed_v[...] = jnp.zeros_like(summed_v)

    @pl.when(first_seeing[row, tile] + step < end_seeing[row, tile])
    def _() -> None:
        scores = _scores(k_context[...], q[...], _seen(k_context, limits, tile), scale)
        weights, d_scores = _gradients(scores, v_context[...], logsumexp, delta, d_out, scale)
        summed_k[...] += _dot(d_scores.astype(q.dtype), q[...], 1, 0)
        summed_v[...] += _dot(weights.astype(d_out.dtype), d_out[...], 1, 0)

    @pl.when(step == pl.num_programs(3) - 1)
    def _() -> None:
        d_k[...] = summed_k[...].astype(d_k.dtype)
        d_v[...] = summed_v[...].astype(d_v.dtype)


def _tile(first_tile: Any) -> tuple[jax.Array, jax.Array]:
    """The tile of the context that this step is for, and which step it is."""
    step = pl.program_id(3)
    return first_tile[pl.program_id(0), pl.program_id(2)] + step, step


def _dot(a: jax.Array, b: jax.Array, a_axis: int, b_axis: int) -> jax.Array:
    # Else a TPU multiplies float32 in bfloat16.
    precision = jax.lax.Precision.HIGHEST if a.dtype == jnp.float32 else None
    return jax.lax.dot_general(
        a, b, (((a_axis,), (b_axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )


def _scores(keys: jax.Array, queries: jax.Array, seen: jax.Array, scale: float) -> jax.Array:
    return jnp.where(seen, _dot(keys, queries, 1, 1) * scale, _LOWEST)


def _seen(keys: Any, limits: Any, tile: jax.Array) -> jax.Array:
    width = keys.shape[0]
    shape = (width, limits.shape[1])
    token = tile * width + jax.lax.broadcasted_iota(jnp.int32, shape, 0)
    return (token >= limits[0:1, :]) & (token < limits[1:2, :])


def _gradients(
    scores: jax.Array, values: jax.Array, logsumexp: Any, delta: Any, d_out: Any, scale: float
) -> tuple[jax.Array, jax.Array]:
    weights = jnp.exp(scores - logsumexp[...])
    d_weights = _dot(values, d_out[...], 1, 1)
    return weights, weights * (d_weights - delta[...]) * scale
