"""The allotment as a Mosaic kernel for TPU, without a sort.

The survival that just gets in is found by bisection on the bits of the floats, which for positive numbers
are ordered as they are; those that tie with it, by bisection on (position, slot). Each step counts.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

_HIGHEST = 0x7F800000  # bits of infinity
_STEPS = 31  # bisection of all positive int32


@functools.partial(jax.jit, static_argnames=("interpret",))
def allot(
    survival: Float[Array, "lanes drafts"],
    lengths: Int[Array, "lanes"],
    slots: Int[Array, "lanes"],
    budget: Int[Array, ""],
    least: Int[Array, ""],
    most: Int[Array, ""],
    epsilon: Float[Array, ""],
    *,
    interpret: Any = False,
) -> Int[Array, "lanes"]:
    """See `pallas_kernels.survival.api.allot`; `interpret` is that of `pallas_call`."""
    lanes, drafts = survival.shape
    limits = jnp.stack([budget, least, most]).astype(jnp.int32)
    smem, vmem = (pl.BlockSpec(memory_space=space) for space in (pltpu.SMEM, pltpu.VMEM))
    out = pl.pallas_call(
        _kernel,
        name="allot",
        in_specs=[smem, smem, vmem, vmem, vmem],
        out_specs=vmem,
        out_shape=jax.ShapeDtypeStruct((1, lanes), jnp.int32),
        scratch_shapes=[pltpu.VMEM((drafts, lanes), jnp.int32)],
        cost_estimate=pl.CostEstimate(
            flops=4 * _STEPS * lanes * drafts, transcendentals=0, bytes_accessed=4 * lanes * (drafts + 3)
        ),
        interpret=interpret,
    )(
        limits,
        epsilon.astype(jnp.float32).reshape(1),
        survival.astype(jnp.float32).T,
        lengths.astype(jnp.int32)[None],
        slots.astype(jnp.int32)[None],
    )
    return out[0]


def _kernel(limits: Any, epsilon: Any, survival: Any, lengths: Any, slots: Any, out: Any, keys: Any) -> None:
    drafts, lanes = survival.shape
    budget, least, most = limits[0], limits[1], limits[2]
    length = lengths[...]
    running = jnp.full((1, lanes), jnp.inf, jnp.float32)
    for i in range(drafts):
        running = jnp.minimum(running, survival[i : i + 1, :])
        wanted = (i < length) & (i <= most) & (running >= epsilon[0])
        bits = jnp.maximum(pltpu.bitcast(running, jnp.int32), 0)  # -0 as 0
        keys[i : i + 1, :] = jnp.where(wanted, bits, -1)
    key = keys[...]

    def count(chosen: jax.Array) -> jax.Array:
        return jnp.sum(chosen.astype(jnp.int32))

    number = jnp.minimum(budget, count(key >= 0))

    def lower(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + ((high - low + 1) >> 1)
        enough = count(key >= middle) >= number
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

    last, _ = jax.lax.fori_loop(0, _STEPS, lower, (jnp.int32(0), jnp.int32(_HIGHEST)))
    above, tied = key > last, key == last
    missing = number - count(above)
    slot = slots[...]
    span = jnp.max(slot) + 1
    rank = jax.lax.broadcasted_iota(jnp.int32, (drafts, lanes), 0) * span + slot

    def upper(_: Any, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + ((high - low) >> 1)
        enough = count(tied & (rank < middle)) >= missing
        return jnp.where(enough, low, middle + 1), jnp.where(enough, middle, high)

    end, _ = jax.lax.fori_loop(0, _STEPS, upper, (jnp.int32(0), drafts * span))
    chosen = (above | (tied & (rank < end))).astype(jnp.int32)
    taken = jnp.sum(chosen, axis=0, keepdims=True)
    out[...] = jnp.minimum(jnp.minimum(least + taken, most), length)
