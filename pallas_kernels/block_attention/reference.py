"""Attention of blocks in plain XLA, forward and backward: one tile of blocks after the other, against tiles of the
context, of which only those that some block of the tile sees are looked at.

Source: online softmax and its gradient in tiles, Dao (arXiv 2307.08691).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from pallas_kernels.block_attention.layout import Laid, Rules

_LOWEST = -1e30  # of what is not seen; finite, so that a padding row, which sees nothing, has no NaN


def forward(
    laid: Laid, rules: Rules
) -> tuple[
    Float[Array, "rows kv_heads tiles queries value_size"], Float[Array, "rows kv_heads tiles queries"]
]:
    """The output and the log-sum-exp of every query."""

    def one(at: tuple[Array, ...]) -> tuple[Array, Array]:
        row, first_tile, end_tile, q, k, v, first, end = at
        seen = jnp.asarray(_inside(rules))
        scores = _dot("kgbmd,kbtd->kgbmt", _own(q, rules), _own(k, rules)[:, 0]) * rules.scale
        scores = jnp.where(seen, scores, _LOWEST)
        maximum = jnp.max(scores, axis=-1)
        weights = jnp.exp(scores - maximum[..., None])
        out = _dot("kgbmt,kbtd->kgbmd", weights.astype(v.dtype), _own(v, rules)[:, 0])
        total = _flat(jnp.sum(weights, axis=-1)[..., None], rules)[..., 0]
        maximum, out = _flat(maximum[..., None], rules)[..., 0], _flat(out, rules)

        def add(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            maximum, total, out = carry
            keys, values, seen = _context(laid, row, i, first, end)
            scores = _scores(q, keys, seen, rules)
            new = jnp.maximum(maximum, jnp.max(scores, axis=-1))
            weights, decay = jnp.exp(scores - new[..., None]), jnp.exp(maximum - new)
            out = out * decay[..., None] + _weighted(weights, values)
            return new, total * decay + jnp.sum(weights, axis=-1), out

        maximum, total, out = jax.lax.fori_loop(first_tile, end_tile, add, (maximum, total, out))
        return (out / total[..., None]).astype(laid.q.dtype), maximum + jnp.log(total)

    out, logsumexp = jax.lax.map(one, _by_tile(laid))
    return _by_row(out, laid), _by_row(logsumexp, laid)


def backward(
    laid: Laid,
    rules: Rules,
    logsumexp: Float[Array, "rows kv_heads tiles queries"],
    delta: Float[Array, "rows kv_heads tiles queries"],
    d_out: Float[Array, "rows kv_heads tiles queries value_size"],
) -> tuple[Array, Array, Array, Array, Array]:
    """Gradients of q, k, v, k_context, v_context.

    Args:
      laid: as in `forward`.
      rules: likewise.
      logsumexp: from `forward`.
      delta: sum of output times its gradient.
      d_out: gradient of the output.
    """

    def grads(names: str, q: Array, k: Array, v: Array, seen: Array, at: tuple[Array, ...]) -> Any:
        queries, keys = names.split(",")
        pairs = queries[:-1] + "t"
        logsumexp, delta, d_out = at
        scores = jnp.where(seen, _dot(f"{names}->{pairs}", q, k) * rules.scale, _LOWEST)
        weights = jnp.exp(scores - logsumexp)
        d_weights = _dot(f"{names}->{pairs}", d_out, v)
        d_scores = (weights * (d_weights - delta) * rules.scale).astype(q.dtype)
        d_v = _dot(f"{pairs},{queries}->{keys}", weights.astype(d_out.dtype), d_out)
        d_q = _dot(f"{pairs},{keys}->{queries}", d_scores, k)
        return d_q, _dot(f"{pairs},{queries}->{keys}", d_scores, q), d_v

    def one(context: Any, at: Any) -> Any:
        (row, first_tile, end_tile, q, k, v, first, end), of_out = at
        own = (_own(k, rules)[:, 0], _own(v, rules)[:, 0], jnp.asarray(_inside(rules)))
        of_own = tuple(_own(x, rules) for x in of_out)
        d_q, *d_own = grads("kgbmd,kbtd", _own(q, rules), *own, of_own)
        d_q, d_k, d_v = _flat(d_q, rules), *(_flat(x[:, None], rules) for x in d_own)

        def add(i: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
            d_q, *d_context = carry
            keys, values, seen = _context(laid, row, i, first, end)
            more, *new = grads("kmd,ktd", q, keys, values, seen, of_out)
            at = (row, 0, i * laid.tile_tokens, 0)
            d_context = (
                jax.lax.dynamic_update_slice(
                    whole, jax.lax.dynamic_slice(whole, at, (1, *part.shape)) + part[None], at
                )
                for whole, part in zip(d_context, new, strict=True)
            )
            return d_q + more, *d_context

        d_q, *d_context = jax.lax.fori_loop(first_tile, end_tile, add, (d_q, *context))
        return tuple(d_context), tuple(x.astype(q.dtype) for x in (d_q, d_k, d_v))

    start = jnp.zeros(laid.k_context.shape, jnp.float32), jnp.zeros(laid.v_context.shape, jnp.float32)
    of_out = tuple(_by_number(x) for x in (logsumexp[..., None], delta[..., None], d_out))
    (d_k_context, d_v_context), own = jax.lax.scan(one, start, (_by_tile(laid), of_out))
    d_q, d_k, d_v = (_by_row(x, laid) for x in own)
    dtype = laid.k_context.dtype
    return d_q, d_k, d_v, d_k_context.astype(dtype), d_v_context.astype(dtype)


def _dot(products: str, a: Array, b: Array) -> Array:
    return jnp.einsum(products, a, b, preferred_element_type=jnp.float32)


def _scores(q: Array, k: Array, seen: Array, rules: Rules) -> Array:
    return jnp.where(seen[None], _dot("kmd,ktd->kmt", q, k) * rules.scale, _LOWEST)


def _weighted(weights: Array, v: Array) -> Array:
    return _dot("kmt,ktd->kmd", weights.astype(v.dtype), v)


def _inside(rules: Rules) -> np.ndarray:
    """[blocks, block, block]: who sees which row of its block; the last one of a tile may be cut off."""
    blocks = -(-rules.tile_rows // rules.block_size)
    number = np.arange(blocks * rules.block_size).reshape(blocks, 1, rules.block_size)
    return rules.inside_of_block() & (number < rules.tile_rows)


def _own(array: Array, rules: Rules) -> Array:
    """[kv_heads, group * tile_rows, size] of one tile as [kv_heads, group, blocks, block, size]."""
    kv_heads, rows, size = array.shape
    missing = -rules.tile_rows % rules.block_size
    array = array.reshape(kv_heads, rows // rules.tile_rows, rules.tile_rows, size)
    array = jnp.pad(array, ((0, 0), (0, 0), (0, missing), (0, 0)))
    return array.reshape(*array.shape[:2], -1, rules.block_size, size)


def _flat(array: Array, rules: Rules) -> Array:
    """Undoes `_own`."""
    kv_heads, group, _, _, size = array.shape
    array = array.reshape(kv_heads, group, -1, size)[:, :, : rules.tile_rows]
    return array.reshape(kv_heads, -1, size)


def _context(laid: Laid, row: Array, tile: Array, first: Array, end: Array) -> tuple[Array, Array, Array]:
    """Keys, values [kv_heads, tokens, size] of one tile of a row's context, and who sees which."""
    width = laid.tile_tokens

    def part(array: Array) -> Array:
        _, kv_heads, _, size = array.shape
        return jax.lax.dynamic_slice(array, (row, 0, tile * width, 0), (1, kv_heads, width, size))[0]

    token = tile * width + jnp.arange(width, dtype=jnp.int32)
    seen = (token[None] >= first[:, None]) & (token[None] < end[:, None])
    return part(laid.k_context), part(laid.v_context), seen


def _by_tile(laid: Laid) -> tuple[Array, ...]:
    rows, _, tiles = laid.q.shape[:3]
    row = jnp.repeat(jnp.arange(rows, dtype=jnp.int32), tiles)
    seen = (x.reshape(-1) for x in laid.seen_tiles())
    limits = (x.reshape(rows * tiles, -1) for x in (laid.first, laid.end))
    return row, *seen, *(_by_number(x) for x in (laid.q, laid.k, laid.v)), *limits


def _by_number(array: Array) -> Array:
    """[rows, kv_heads, tiles, ...] as [rows * tiles, kv_heads, ...]."""
    rows, kv_heads, tiles, *rest = array.shape
    return array.swapaxes(1, 2).reshape(rows * tiles, kv_heads, *rest)


def _by_row(array: Array, laid: Laid) -> Array:
    rows, _, tiles = laid.q.shape[:3]
    return array.reshape(rows, tiles, *array.shape[1:]).swapaxes(1, 2)
