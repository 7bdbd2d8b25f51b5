"""The allotment as a sort: the definition."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def allot(
    survival: Float[Array, "lanes drafts"],
    lengths: Int[Array, "lanes"],
    slots: Int[Array, "lanes"],
    budget: Int[Array, ""],
    least: Int[Array, ""],
    most: Int[Array, ""],
    epsilon: Float[Array, ""],
) -> Int[Array, "lanes"]:
    """See `pallas_kernels.survival.api.allot`."""
    lanes, drafts = survival.shape
    monotone = jax.lax.cummin(survival, axis=1)
    position = jax.lax.broadcasted_iota(jnp.int32, (lanes, drafts), 1)
    # One more than may be verified competes: it is the bonus of a lane that verifies the most.
    wanted = (position < lengths[:, None]) & (position <= most) & (monotone >= epsilon)
    lane = jax.lax.broadcasted_iota(jnp.int32, (lanes, drafts), 0)
    slot = jnp.broadcast_to(slots.astype(jnp.int32)[:, None], (lanes, drafts))
    order = (jnp.where(wanted, -monotone, jnp.inf), position, slot, lane)
    *_, ranked = jax.lax.sort([keys.reshape(-1) for keys in order], num_keys=3)
    first = jnp.arange(lanes * drafts, dtype=jnp.int32) < budget
    taken = jnp.zeros((lanes,), jnp.int32).at[ranked].add(first.astype(jnp.int32))
    taken = jnp.minimum(taken, jnp.sum(wanted, axis=1, dtype=jnp.int32))
    return jnp.minimum(jnp.minimum(least + taken, most), lengths)
