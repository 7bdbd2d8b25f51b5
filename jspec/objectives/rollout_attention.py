"""Attention of rollout rows: the context rows that a row may see, and its own earlier depths.

Scores are [places, tokens + depths] a head: what decoding would have computed for the same rows. A mask over
all depths of all rows, of which nearly everything is masked, is never built.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.targets.config import DecoderConfig
from jspec.targets.layers import See

_BLOCK = 512  # rows whose scores are in memory at a time


def rollout_see(
    config: DecoderConfig,
    k_context: Float[Array, "rows tokens kv_heads head_size"] | None,
    v_context: Float[Array, "rows tokens kv_heads head_size"] | None,
    visible: Bool[Array, "rows places tokens"],
    k_own: Float[Array, "rows places depths kv_heads head_size"] | None = None,
    v_own: Float[Array, "rows places depths kv_heads head_size"] | None = None,
) -> See:
    """What the rows at `places` see in one layer.

    Args:
      config: of the layer.
      k_context: depth-0 keys of all tokens; None: the rows are these tokens, and bring them.
      v_context: likewise the values.
      visible: which of them each row sees.
      k_own: keys of the row's depths 1, 2, ..., in front of the one that it brings.
      v_own: likewise the values.
    """
    rows, places, _ = visible.shape

    def see(q: Array, k: Array, v: Array) -> Array:
        q = q.reshape(rows, places, config.num_heads, -1)
        k = k.reshape(rows, places, config.num_kv_heads, -1)
        v = v.reshape((*k.shape[:3], -1))
        if k_context is None or v_context is None:
            none = k[:, :, None][:, :, :0], v[:, :, None][:, :, :0]
            out = blockwise(q, k, v, visible, *none, scale=config.query_scale)
        else:
            own_k, own_v = k[:, :, None], v[:, :, None]
            if k_own is not None and v_own is not None:
                own_k, own_v = jnp.concatenate([k_own, own_k], 2), jnp.concatenate([v_own, own_v], 2)
            out = blockwise(q, k_context, v_context, visible, own_k, own_v, scale=config.query_scale)
        return out.reshape(rows * places, config.num_heads, -1)

    return see


def blockwise(
    q: Float[Array, "rows places heads head_size"],
    k_context: Float[Array, "rows tokens kv_heads head_size"],
    v_context: Float[Array, "rows tokens kv_heads head_size"],
    visible: Bool[Array, "rows places tokens"],
    k_own: Float[Array, "rows places depths kv_heads head_size"],
    v_own: Float[Array, "rows places depths kv_heads head_size"],
    own: Bool[Array, "rows places depths"] | None = None,
    *,
    scale: float,
    block: int = _BLOCK,
) -> Float[Array, "rows places heads head_size"]:
    """One softmax over the visible context and the own rows; scores of `block` rows at a time.

    Scores are computed again in the backward pass.

    Args:
      q: queries of the rows.
      k_context: keys that all rows of a token row share.
      v_context: their values.
      visible: which of them a row sees.
      k_own: keys that a row alone sees.
      v_own: their values.
      own: which of those are there; None = all.
      scale: on the scores.
      block: rows at a time.
    """
    places = q.shape[1]
    attended = jax.checkpoint(functools.partial(_attended, scale=scale))
    own = jnp.ones(k_own.shape[:3], jnp.bool_) if own is None else own
    if places <= block:
        return attended(q, k_context, v_context, visible, k_own, v_own, own)
    pieces = -(-places // block)

    def split(array: Array) -> Array:
        filler = [(0, 0), (0, pieces * block - places)] + [(0, 0)] * (array.ndim - 2)
        array = jnp.pad(array, filler).reshape(array.shape[0], pieces, block, *array.shape[2:])
        return jnp.moveaxis(array, 1, 0)

    def one(piece: tuple[Array, ...]) -> Array:
        q, visible, k_own, v_own, own = piece
        return attended(q, k_context, v_context, visible, k_own, v_own, own)

    out = jax.lax.map(one, tuple(split(a) for a in (q, visible, k_own, v_own, own)))
    out = jnp.moveaxis(out, 0, 1)
    return out.reshape(out.shape[0], pieces * block, *out.shape[3:])[:, :places]


def _attended(
    q: Array,
    k_context: Array,
    v_context: Array,
    visible: Array,
    k_own: Array,
    v_own: Array,
    own: Array,
    *,
    scale: float,
) -> Array:
    rows, places, heads, head_size = q.shape
    kv_heads = k_context.shape[2]
    q = q.reshape(rows, places, kv_heads, heads // kv_heads, head_size)
    context = jnp.einsum("rpkgd,rtkd->rkgpt", q, k_context, preferred_element_type=jnp.float32) * scale
    context = jnp.where(visible[:, None, None], context, -jnp.inf)
    mine = jnp.einsum("rpkgd,rpekd->rkgpe", q, k_own, preferred_element_type=jnp.float32) * scale
    mine = jnp.where(own[:, None, None], mine, -jnp.inf)
    top = jnp.maximum(jnp.max(context, axis=-1), jnp.max(mine, axis=-1, initial=-jnp.inf))
    # Filler rows see nothing.
    top = jax.lax.stop_gradient(jnp.where(jnp.isfinite(top), top, 0))[..., None]
    context, mine = jnp.exp(context - top), jnp.exp(mine - top)
    total = jnp.sum(context, axis=-1) + jnp.sum(mine, axis=-1)
    total = jnp.maximum(total, jnp.finfo(jnp.float32).tiny)
    out = jnp.einsum("rkgpt,rtkd->rpkgd", context.astype(v_context.dtype), v_context)
    out = out + jnp.einsum("rkgpe,rpekd->rpkgd", mine.astype(v_own.dtype), v_own)
    out = out / jnp.moveaxis(total, 3, 1)[..., None]
    return out.astype(q.dtype).reshape(rows, places, heads, -1)
