"""Attention of blocks over known text, as block drafters are trained: each block over the context before its anchor
and over itself, forward and backward, without a mask or scores over all blocks and tokens."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention import reference, tpu
from pallas_kernels.block_attention.layout import Laid, Rules, as_blocks, lay_out


def attend_blocks(
    q: Float[Array, "rows blocks block heads head_size"],
    k: Float[Array, "rows blocks block kv_heads head_size"],
    v: Float[Array, "rows blocks block kv_heads value_size"],
    k_context: Float[Array, "rows tokens kv_heads head_size"],
    v_context: Float[Array, "rows tokens kv_heads value_size"],
    starts: Int[Array, "rows blocks"],
    anchors: Int[Array, "rows blocks"],
    *,
    scale: float,
    causal: bool = False,
    window: int | None = None,
    implementation: str | None = None,
) -> Float[Array, "rows blocks block heads value_size"]:
    """One softmax of every block row over tokens of its row's context and over its own block; float32 inside.

    Row i of a block sees the tokens from its start on and before its anchor, strictly, and its own block.

    Args:
      q: queries of all blocks; `heads` is a multiple of `kv_heads`.
      k: keys of the blocks.
      v: values of the blocks.
      k_context: keys of the tokens.
      v_context: values of the tokens.
      starts: the first token that a block sees.
      anchors: the token at which a block stands, where row i has the place anchor + i; start = anchor: it sees none.
      scale: factor on q . k.
      causal: in its block a row sees itself and those before it; else all of them.
      window: the last places that a row sees, its own among them, in the context as in the block; None = all.
      implementation: as in `pallas_kernels.attention.api.attend`.

    Raises:
      ValueError: a window of no place, an unknown implementation.
    """
    if implementation not in (None, "xla", "tpu"):
        raise ValueError(
            f'implementation: expected None, "xla" or "tpu", got {implementation!r}; pass one of them'
        )
    if window is not None and window < 1:
        raise ValueError(f"window: expected at least 1, the row itself, or None, got {window}; raise it")
    rules = Rules(scale=scale, block_size=q.shape[2], window=window, causal=causal)
    laid = lay_out(q, k, v, k_context, v_context, starts, anchors, rules)
    arrays = (laid.q, laid.k, laid.v, laid.k_context, laid.v_context)
    return as_blocks(_attend(arrays, (laid.first, laid.end), rules, implementation), q.shape[1], rules)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attend(arrays: tuple[Array, ...], limits: tuple[Array, Array], rules: Rules, implementation: str | None):
    return _saved(arrays, limits, rules, implementation)[0]


def _saved(
    arrays: tuple[Array, ...], limits: tuple[Array, Array], rules: Rules, implementation: str | None
) -> tuple[Array, tuple[Laid, Array, Array]]:
    q, k, v, k_context, v_context = arrays
    laid = Laid(q=q, k=k, v=v, k_context=k_context, v_context=v_context, first=limits[0], end=limits[1])
    out, logsumexp = _chosen(tpu.forward, reference.forward, implementation, laid, rules)
    return out, (laid, out, logsumexp)


def _backward(
    rules: Rules, implementation: str | None, saved: tuple[Laid, Array, Array], d_out: Array
) -> tuple[tuple[Array, ...], None]:
    laid, out, logsumexp = saved
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    return _chosen(
        tpu.backward, reference.backward, implementation, laid, rules, logsumexp, delta, d_out
    ), None


def _chosen(
    kernel: Callable, plain: Callable, implementation: str | None, laid: Laid, rules: Rules, *arrays: Array
) -> Any:
    kernel, plain = (functools.partial(_run, run, rules) for run in (kernel, plain))
    if implementation is None:
        return jax.lax.platform_dependent(laid, *arrays, tpu=kernel, default=plain)
    return (kernel if implementation == "tpu" else plain)(laid, *arrays)


def _run(run: Callable, rules: Rules, laid: Laid, *arrays: Array) -> Any:
    return run(laid, rules, *arrays)


_attend.defvjp(_saved, _backward)
