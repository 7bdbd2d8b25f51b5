"""The first position where something holds."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def first_where(condition: Bool[Array, "rows columns"], missing: int) -> Int[Array, "rows"]:
    """Index of each row's first True, `missing` where there is none.

    A minimum over indices, not an argmax: XLA's CPU argmax is a scalar loop.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, condition.shape, 1)
    return jnp.min(jnp.where(condition, index, missing), axis=1)
