"""The running requests as device arrays: one row per slot, whatever the round's bucket is."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.protocol import Text
from jspec.sampling import History, SamplingTable, empty_history, empty_table
from pallas_kernels.pytree import pytree


@pytree
class Slots:
    """Everything about a request that a round reads or changes."""

    text: Text
    prompt_lengths: Int[Array, "slots"]
    known_lengths: Int[
        Array, "slots"
    ]  # tokens known at admission: as long as there are no more, none was emitted
    limits: Int[Array, "slots"]  # text length (prompt included) at which the request ends
    draft_caps: Int[Array, "slots"]  # draft tokens allowed per round; 0 = speculation off for this request
    min_confidences: Float[Array, "slots"]  # of draft tokens that are verified; 0 = any
    live: Bool[Array, "slots"]  # set by admission, cleared by `cut`: a late round finds it and does nothing
    table: SamplingTable
    history: History


def slots_of(lanes: Int[Array, "lanes"], max_slots: int) -> Int[Array, "lanes"]:
    """Rows to scatter to: padding lanes point past the end, where mode="drop" loses them."""
    return jnp.where(lanes >= 0, lanes, max_slots)


def rows_of(lanes: Int[Array, "lanes"]) -> Int[Array, "lanes"]:
    """Rows to gather from: padding lanes read row 0, and whoever reads must mask them."""
    return jnp.maximum(lanes, 0)


def empty_slots(max_slots: int, max_context: int, vocab_size: int, max_stop_ids: int) -> Slots:
    """Slots without requests."""

    def zeros() -> jax.Array:  # each field needs its own buffer: all of them are donated
        return jnp.zeros((max_slots,), jnp.int32)

    return Slots(
        text=Text(tokens=jnp.zeros((max_slots, max_context), jnp.int32), lengths=zeros()),
        prompt_lengths=zeros(),
        known_lengths=zeros(),
        limits=zeros(),
        draft_caps=zeros(),
        min_confidences=jnp.zeros((max_slots,), jnp.float32),
        live=jnp.zeros((max_slots,), bool),
        table=empty_table(max_slots, vocab_size, max_stop_ids),
        history=empty_history(max_slots, vocab_size),
    )
