"""The running requests as device arrays: one row per slot, whatever the round's bucket is."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.drafters.protocol import Text
from jspec.sampling import History, SamplingTable
from pallas_kernels.pytree import pytree


@pytree
class Slots:
    """Everything about a request that a round reads or changes."""

    text: Text
    prompt_lengths: Int[Array, "slots"]
    limits: Int[Array, "slots"]  # text length (prompt included) at which the request ends
    draft_caps: Int[Array, "slots"]  # draft tokens allowed per round; 0 = speculation off for this request
    live: Bool[Array, "slots"]  # set by admission, cleared by `cut`: a late round finds it and does nothing
    table: SamplingTable
    history: History


def slots_of(lanes: Int[Array, "lanes"], max_slots: int) -> Int[Array, "lanes"]:
    """Rows to scatter to: padding lanes point past the end, where mode="drop" loses them."""
    return jnp.where(lanes >= 0, lanes, max_slots)


def rows_of(lanes: Int[Array, "lanes"]) -> Int[Array, "lanes"]:
    """Rows to gather from: padding lanes read row 0, and whoever reads must mask them."""
    return jnp.maximum(lanes, 0)
