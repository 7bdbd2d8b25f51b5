"""Which draft tokens of a round are verified: those most likely to survive, by a total order."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.survival import reference, tpu


def allot(
    survival: Float[Array, "lanes drafts"],
    lengths: Int[Array, "lanes"],
    slots: Int[Array, "lanes"],
    budget: Int[Array, ""] | int,
    least: Int[Array, ""] | int,
    most: Int[Array, ""] | int,
    epsilon: Float[Array, ""] | float,
    *,
    implementation: str | None = None,
) -> Int[Array, "lanes"]:
    """How many draft tokens of each lane are among the first `budget` of all.

    The order: survival as far as it has fallen along the lane, descending; then position; then slot.

    Args:
      survival: P(draft token and all before it on its path accepted), in [0, 1].
      lengths: draft tokens that each lane has; the rest of its row is ignored and may be NaN.
      slots: of the lanes, distinct; -1 for padding, which has no draft tokens.
      budget: draft tokens over all lanes, besides `least` of each.
      least: every lane gets so many, if it has them.
      most: no lane gets more.
      epsilon: a draft token of less survival gets nothing.
      implementation: as in `pallas_kernels.attention.api.attend`.

    Raises:
      ValueError: an unknown implementation.
    """
    if implementation not in (None, "xla", "tpu"):
        raise ValueError(
            f'implementation: expected None, "xla" or "tpu", got {implementation!r}; pass one of them'
        )
    arguments = (
        survival,
        lengths,
        slots,
        jnp.asarray(budget, jnp.int32),
        jnp.asarray(least, jnp.int32),
        jnp.asarray(most, jnp.int32),
        jnp.asarray(epsilon, jnp.float32),
    )
    if implementation == "tpu":
        return tpu.allot(*arguments)
    if implementation == "xla":
        return reference.allot(*arguments)
    return jax.lax.platform_dependent(*arguments, tpu=tpu.allot, default=reference.allot)
