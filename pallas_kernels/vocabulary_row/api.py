"""What sampling needs of rows of logits: one pass over each row, where a kernel makes it."""

import functools

import jax
from jaxtyping import Array, Float, Int

from pallas_kernels.vocabulary_row import reference, tpu
from pallas_kernels.vocabulary_row.tempered import Tempered


def temper(
    logits: Float[Array, "rows vocabulary"],
    temperature: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    coins: Float[Array, "rows"] | None = None,
    *,
    implementation: str | None = None,
) -> Tempered:
    """Temperature, then top-k, top-p and min-p, and a draw.

    The best token's logit becomes 0, which keeps small temperatures finite and changes no probability. Tokens
    that tie at a floor stay together. top-p looks at the mass that top-k kept: a token passes iff the mass
    strictly above it is less than that share. The best token is always kept.

    Args:
      logits: float32; -inf for a token that is not allowed. A row with NaN or +inf draws -1 and disturbs no other.
      temperature: 0 = greedy: its row passes unchanged, and the other settings do not act on it.
      top_k: tokens to keep, 0 = all.
      top_p: mass to keep, 1 = all.
      min_p: least kept probability relative to the best token's, 0 = all.
      coins: uniform in [0, 1): the draw is the first id whose cumulative probability exceeds the coin, -1 if
        the row is no distribution. None = nothing is drawn.
      implementation: as in `pallas_kernels.attention.api.attend`; "gpu" takes float32 and any vocabulary.

    Raises:
      ValueError: an unknown implementation, or one that cannot do this call.
    """
    if implementation not in (None, "xla", "tpu", "gpu"):
        raise ValueError(
            f'implementation: expected None, "xla", "tpu" or "gpu", got {implementation!r}; pass one of them'
        )
    arguments = (logits, temperature, top_k, top_p, min_p)
    kernel = functools.partial(tpu.temper, coins=coins)
    plain = functools.partial(reference.temper, coins=coins)
    if implementation == "tpu":
        return kernel(*arguments)
    if implementation == "gpu":
        from pallas_kernels.vocabulary_row import gpu  # only here: Mosaic GPU needs absl-py in jax 0.10

        if refusal := gpu.unsupported(logits):
            raise ValueError(refusal)
        return gpu.temper(*arguments, coins)
    if implementation == "xla":
        return plain(*arguments)
    return jax.lax.platform_dependent(*arguments, tpu=kernel, default=plain)
