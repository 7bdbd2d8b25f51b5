"""One attention for prefill, chain, tree and block: over committed pages and in-flight keys."""

from typing import Literal, overload

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.attention import reference, tpu
from pallas_kernels.attention.pages import PAGE_MULTIPLE, Pages
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
      implementation: "xla" is plain XLA and works everywhere; "tpu" is the kernel for TPU and cannot be
        lowered for anything else; "gpu" is the kernel for NVIDIA GPUs from sm90 on, for bfloat16, head sizes
        64 and 128, pages of a multiple of 64 and jax 0.12, which has not yet run on a GPU and is therefore
        never chosen by itself; None takes "tpu" where the program is lowered for a TPU and the page size
        is a multiple of 128, and "xla" otherwise.

    Returns:
      The output in q's dtype, and the log-sum-exp if asked for.

    Raises:
      ValueError: shapes that do not fit together, a layer that pages lacks, an unknown implementation, or
        one that cannot do this call.
    """
    _check(q, k_new, v_new, pages, layer, sight, implementation)

    def xla(q: Array, k_new: Array, v_new: Array, sight: Sight) -> Array | tuple[Array, Array]:
        out, logsumexp = reference.attend(q, k_new, v_new, pages, layer, sight, scale, softcap, sinks)
        return (out, logsumexp) if return_logsumexp else out

    def kernel(q: Array, k_new: Array, v_new: Array, sight: Sight) -> Array | tuple[Array, Array]:
        out, logsumexp = tpu.attend(
            q,
            k_new,
            v_new,
            pages,
            layer,
            sight,
            scale,
            softcap,
            sinks,
            with_logsumexp=return_logsumexp,
        )
        return (out, logsumexp) if return_logsumexp else out

    if implementation == "tpu":
        return kernel(q, k_new, v_new, sight)
    if implementation == "gpu":
        from pallas_kernels.attention import gpu  # only here: Mosaic GPU needs absl-py in jax 0.10

        if refusal := gpu.unsupported(q, pages):
            raise ValueError(refusal)
        out, logsumexp = gpu.attend(q, k_new, v_new, pages, layer, sight, scale, softcap, sinks)
        return (out, logsumexp) if return_logsumexp else out
    if implementation == "xla" or pages.page_size % PAGE_MULTIPLE:
        return xla(q, k_new, v_new, sight)
    return jax.lax.platform_dependent(q, k_new, v_new, sight, tpu=kernel, default=xla)


def _check(
    q: Array,
    k_new: Array,
    v_new: Array,
    pages: Pages,
    layer: int | Array,
    sight: Sight,
    implementation: str | None,
) -> None:
    if implementation not in (None, "xla", "tpu", "gpu"):
        raise ValueError(
            f'implementation: expected None, "xla", "tpu" or "gpu", got {implementation!r}; pass one of them'
        )
    if implementation == "tpu" and pages.page_size % PAGE_MULTIPLE:
        raise ValueError(
            f'pages: expected a page size that is a multiple of {PAGE_MULTIPLE} for implementation="tpu", '
            f'got {pages.page_size}; allocate such pages, or use "xla"'
        )
    num_layers, _, kv_heads, head_size, _ = pages.stored_k.shape
    if isinstance(layer, int) and not 0 <= layer < num_layers:
        raise ValueError(f"layer: expected 0 to {num_layers - 1}, got {layer}; it indexes pages")
    if q.shape[0] == 0:
        raise ValueError("q: expected at least one query, got none; pad the round to its bucket")
    value_size = pages.value_size
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
