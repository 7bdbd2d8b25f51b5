"""Attention of blocks over known text, as block drafters are trained: each block over the context before its anchor
and over itself, forward and backward, without a mask or scores over all blocks and tokens."""

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.block_attention import reference, tpu
from pallas_kernels.block_attention.layout import Rules, as_blocks, as_tiles, lay_out

Arrays = tuple[Array, Array, Array, Array, Array]  # q, k, v, k_context, v_context
Places = tuple[Array, Array]  # starts, anchors


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
      window: the last places that a row sees of the context, its own counted; None = all. It does not cut the
        block.
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
    return _attend((q, k, v, k_context, v_context), (starts, anchors), rules, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _attend(arrays: Arrays, places: Places, rules: Rules, implementation: str | None):
    return _saved(arrays, places, rules, implementation)[0]


def _saved(arrays: Arrays, places: Places, rules: Rules, implementation: str | None) -> tuple[Array, tuple]:
    saved = _chosen(_forward, rules, implementation, arrays, places)
    return saved[0], (arrays, places, *saved)


def _forward(run: ModuleType, rules: Rules, arrays: Arrays, places: Places) -> tuple[Array, Array]:
    """The output and, as [rows, blocks, block, heads], the log-sum-exp."""
    out, logsumexp = run.forward(lay_out(*arrays, *places, rules), rules)
    num_blocks = arrays[0].shape[1]
    return as_blocks(out, num_blocks, rules), as_blocks(logsumexp[..., None], num_blocks, rules)[..., 0]


def _backward(
    rules: Rules, implementation: str | None, saved: tuple, d_out: Array
) -> tuple[tuple[Array, ...], None]:
    arrays, places, out, logsumexp = saved
    return _chosen(_gradients, rules, implementation, arrays, places, out, logsumexp, d_out), None


def _gradients(
    run: ModuleType,
    rules: Rules,
    arrays: Arrays,
    places: Places,
    out: Array,
    logsumexp: Array,
    d_out: Array,
) -> tuple[Array, ...]:
    (_, num_blocks, *_), (_, tokens, kv_heads, _) = arrays[0].shape, arrays[3].shape
    of_out = (as_tiles(x, kv_heads, rules) for x in (out, logsumexp[..., None], d_out))
    out, logsumexp, d_out = of_out
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1)
    laid = lay_out(*arrays, *places, rules)
    *own, d_k, d_v = run.backward(laid, rules, logsumexp[..., 0], delta, d_out)
    of_context = (x.swapaxes(1, 2)[:, :tokens] for x in (d_k, d_v))
    return *(as_blocks(x, num_blocks, rules) for x in own), *of_context


def _chosen(call: Callable, rules: Rules, implementation: str | None, *arrays: Any) -> Any:
    """On TPU in the layout of kernels, elsewhere in a tight one."""
    kernel = functools.partial(call, tpu, rules)
    plain = functools.partial(call, reference, rules.tightened(arrays[0][0].shape[1]))
    if implementation is None:
        return jax.lax.platform_dependent(*arrays, tpu=kernel, default=plain)
    return (kernel if implementation == "tpu" else plain)(*arrays)


_attend.defvjp(_saved, _backward)
