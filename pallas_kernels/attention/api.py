"""One attention for prefill, chain, tree and block: over committed pages and in-flight keys."""

from typing import Literal, overload

from jaxtyping import Array, Float, Int

from pallas_kernels.attention import reference
from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight


@overload
def attend(
    q: Float[Array, "queries heads head_size"],
    k_new: Float[Array, "keys kv_heads head_size"],
    v_new: Float[Array, "keys kv_heads value_size"],
    pages: Pages,
    layer: int | Int[Array, ""],
    sight: Sight,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    return_logsumexp: Literal[False] = False,
    implementation: str | None = None,
) -> Float[Array, "queries heads value_size"]: ...


@overload
def attend(
    q: Float[Array, "queries heads head_size"],
    k_new: Float[Array, "keys kv_heads head_size"],
    v_new: Float[Array, "keys kv_heads value_size"],
    pages: Pages,
    layer: int | Int[Array, ""],
    sight: Sight,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    return_logsumexp: Literal[True],
    implementation: str | None = None,
) -> tuple[Float[Array, "queries heads value_size"], Float[Array, "queries heads"]]: ...


def attend(
    q: Float[Array, "queries heads head_size"],
    k_new: Float[Array, "keys kv_heads head_size"],
    v_new: Float[Array, "keys kv_heads value_size"],
    pages: Pages,
    layer: int | Int[Array, ""],
    sight: Sight,
    *,
    scale: float,
    softcap: float | None = None,
    sinks: Float[Array, "heads"] | None = None,
    return_logsumexp: bool = False,
    implementation: str | None = None,
) -> (
    Float[Array, "queries heads value_size"]
    | tuple[Float[Array, "queries heads value_size"], Float[Array, "queries heads"]]
):
    """Softmax attention of every query over what its `sight` names; float32 inside.

    Loops are bounded by the real context lengths, never by the width of the page table. Padding
    queries and keys, free pages, and rows past a lane's context may hold NaN: nothing of them
    reaches the output, in which padding queries are 0. A query that sees nothing gets 0.

    Args:
      q: queries, lanes packed; `heads` is a multiple of `kv_heads`.
      k_new: in-flight keys, lanes packed.
      v_new: in-flight values.
      pages: committed keys and values; `value_size` must be their head size.
      layer: which layer of `pages` to read.
      sight: who sees what.
      scale: factor on q . k.
      softcap: scores become softcap * tanh(score / softcap); None = off.
      sinks: one further logit per head that takes part in the softmax but carries no value.
      return_logsumexp: also return log(sum(exp(scores))) over what was seen and the sink, in natural
        units, float32; -inf where there was nothing.
      implementation: None or "xla".

    Returns:
      The output in q's dtype, and the log-sum-exp if asked for.

    Raises:
      ValueError: shapes that do not fit together, a layer that pages lacks, an unknown implementation.
    """
    if implementation not in (None, "xla"):
        raise ValueError(
            f'implementation: expected None or "xla", got {implementation!r}; no other one is built yet'
        )
    _check(q, k_new, v_new, pages, layer, sight)
    out, logsumexp = reference.attend(q, k_new, v_new, pages, layer, sight, scale, softcap, sinks)
    return (out, logsumexp) if return_logsumexp else out


def _check(q: Array, k_new: Array, v_new: Array, pages: Pages, layer: int | Array, sight: Sight) -> None:
    num_layers, _, kv_heads, head_size, _ = pages.stored_k.shape
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected 0 to {num_layers - 1}, got {layer}; it indexes pages")
    if q.shape[0] == 0:
        raise ValueError("q: expected at least one query, got none; pad the round to its bucket")
    value_size = pages.stored_v.shape[-1]
    if q.shape[1] % kv_heads:
        raise ValueError(
            f"q: expected a multiple of {kv_heads} heads, got {q.shape[1]}; pages has {kv_heads}"
        )
    if q.shape[2] != head_size:
        raise ValueError(f"q: expected head size {head_size}, got {q.shape[2]}; pages was allocated for it")
    if k_new.shape[1:] != (kv_heads, head_size):
        raise ValueError(
            f"k_new: expected [keys, {kv_heads}, {head_size}], got {list(k_new.shape)}; "
            "pages was allocated for it"
        )
    if v_new.shape != (k_new.shape[0], kv_heads, value_size):
        raise ValueError(
            f"v_new: expected {[k_new.shape[0], kv_heads, value_size]}, got {list(v_new.shape)}; "
            "it follows k_new and pages"
        )
    if sight.first_visible.shape[0] != q.shape[0]:
        raise ValueError(
            f"sight: expected {q.shape[0]} queries, got {sight.first_visible.shape[0]}; "
            "build it for this round"
        )
    words = sight.visible.shape[1]
    if words and words * 32 < sight.max_keys:
        raise ValueError(
            f"sight: expected words for {sight.max_keys} keys (max_keys), got {words} words; "
            "visible takes 32 keys a word"
        )
