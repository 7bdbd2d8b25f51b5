"""What decides how each slot samples: its settings and its tokens so far, as device arrays.

One row per slot. A row is made on the host from a request's `Settings`, written at admission, and
read by `target_rows` and by drafters; only the output counts change while a request runs.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

from jspec.settings import Settings
from pallas_kernels.pytree import pytree


@pytree
class SamplingTable:
    """The settings of every slot."""

    temperature: Float[Array, "slots"]  # 0 = greedy
    top_k: Int[Array, "slots"]  # 0 = off
    top_p: Float[Array, "slots"]  # 1 = off
    min_p: Float[Array, "slots"]  # 0 = off
    repetition: Float[Array, "slots"]  # 1 = off
    presence: Float[Array, "slots"]  # 0 = off
    frequency: Float[Array, "slots"]  # 0 = off
    bias: Float[Array, "slots vocabulary"]  # added to the logits; -inf = token not allowed
    biased: Bool[Array, "slots"]  # False = the slot's bias row is all 0
    seeds: UInt32[Array, "slots"]
    seeded: Bool[Array, "slots"]  # the request set its seed: it is verified by `coupled`
    stop_ids: Int[Array, "slots stops"]  # padded with -1
    min_lengths: Int[Array, "slots"]  # tokens emitted before a stop id may be
    log_probs: Int[Array, "slots"]  # best tokens to report besides the emitted one; -1 = report nothing
    prompt_log_probs: Bool[Array, "slots"]  # report those of the prompt's tokens, too


@pytree
class SettingsRow:
    """One slot's row of a SamplingTable, as host arrays."""

    temperature: Float[Array | np.ndarray, ""]
    top_k: Int[Array | np.ndarray, ""]
    top_p: Float[Array | np.ndarray, ""]
    min_p: Float[Array | np.ndarray, ""]
    repetition: Float[Array | np.ndarray, ""]
    presence: Float[Array | np.ndarray, ""]
    frequency: Float[Array | np.ndarray, ""]
    bias: Float[Array | np.ndarray, "vocabulary"]
    biased: Bool[Array | np.ndarray, ""]
    seeds: UInt32[Array | np.ndarray, ""]
    seeded: Bool[Array | np.ndarray, ""]
    stop_ids: Int[Array | np.ndarray, "stops"]
    min_lengths: Int[Array | np.ndarray, ""]
    log_probs: Int[Array | np.ndarray, ""]
    prompt_log_probs: Bool[Array | np.ndarray, ""]


@pytree
class History:
    """The tokens of every slot, as penalties see them."""

    output_counts: Int[Array, "slots vocabulary"]  # emitted tokens
    prompt_seen: Bool[Array, "slots vocabulary"]


def empty_table(max_slots: int, vocab_size: int, max_stop_ids: int) -> SamplingTable:
    """A table of greedy slots.

    Args:
      max_slots: rows.
      vocab_size: of the target.
      max_stop_ids: stop ids that a slot can hold, the model's end-of-sequence ids included.
    """

    def full(value: int, dtype: DTypeLike) -> Array:
        return jnp.full((max_slots,), value, dtype)

    return SamplingTable(
        temperature=full(0, jnp.float32),
        top_k=full(0, jnp.int32),
        top_p=full(1, jnp.float32),
        min_p=full(0, jnp.float32),
        repetition=full(1, jnp.float32),
        presence=full(0, jnp.float32),
        frequency=full(0, jnp.float32),
        bias=jnp.zeros((max_slots, vocab_size), jnp.float32),
        biased=full(False, jnp.bool_),
        seeds=full(0, jnp.uint32),
        seeded=full(False, jnp.bool_),
        stop_ids=jnp.full((max_slots, max_stop_ids), -1, jnp.int32),
        min_lengths=full(0, jnp.int32),
        log_probs=full(-1, jnp.int32),
        prompt_log_probs=full(False, jnp.bool_),
    )


def empty_history(max_slots: int, vocab_size: int) -> History:
    """A history without tokens."""
    return History(
        output_counts=jnp.zeros((max_slots, vocab_size), jnp.int32),
        prompt_seen=jnp.zeros((max_slots, vocab_size), jnp.bool_),
    )


def settings_row(
    settings: Settings, stop_ids: Sequence[int], seed: int, vocab_size: int, max_stop_ids: int
) -> SettingsRow:
    """A request's settings as numbers for its slot. Host code.

    Args:
      settings: already checked against the model.
      stop_ids: from `settings.stop_ids`, the model's end-of-sequence ids included.
      seed: 0 .. 2^32 - 1; the request's own, or a fresh one that no other request has, or their draws agree.
      vocab_size: of the table that the row will be written to.
      max_stop_ids: likewise.

    Raises:
      ValueError: more stop ids than max_stop_ids.
    """
    if len(stop_ids) > max_stop_ids:
        raise ValueError(
            f"stop_token_ids: expected at most {max_stop_ids} stop ids, end-of-sequence ids included, "
            f"got {len(stop_ids)}; use fewer, or build the engine with room for more"
        )
    bias = np.zeros((vocab_size,), np.float32)
    if settings.allowed_token_ids is not None:
        bias[:] = -np.inf
        bias[list(settings.allowed_token_ids)] = 0
    for id_, value in settings.logit_bias.items():
        bias[id_] += value
    stops = np.full((max_stop_ids,), -1, np.int32)
    stops[: len(stop_ids)] = list(stop_ids)
    return SettingsRow(
        temperature=np.asarray(settings.temperature, np.float32),
        top_k=np.asarray(min(settings.top_k or 0, vocab_size), np.int32),
        top_p=np.asarray(settings.top_p, np.float32),
        min_p=np.asarray(settings.min_p, np.float32),
        repetition=np.asarray(settings.repetition_penalty, np.float32),
        presence=np.asarray(settings.presence_penalty, np.float32),
        frequency=np.asarray(settings.frequency_penalty, np.float32),
        bias=bias,
        biased=np.asarray(bias.any()),
        seeds=np.asarray(seed, np.uint32),
        seeded=np.asarray(settings.seed is not None),
        stop_ids=stops,
        min_lengths=np.asarray(min(settings.min_tokens, np.iinfo(np.int32).max), np.int32),
        log_probs=np.asarray(-1 if settings.log_probs is None else settings.log_probs, np.int32),
        prompt_log_probs=np.asarray(settings.prompt_log_probs, np.bool_),
    )


def write_row(table: SamplingTable, slot: Int[Array, ""], row: SettingsRow) -> SamplingTable:
    """Gives a slot the settings of its new request; in place where `table` is donated."""
    fields = {
        field.name: getattr(table, field.name).at[slot].set(getattr(row, field.name))
        for field in dataclasses.fields(table)
    }
    return SamplingTable(**fields)


def admit_history(
    history: History,
    slot: Int[Array, ""],
    tokens: Int[Array, "capacity"],
    text_length: Int[Array, ""],
    prompt_length: Int[Array, ""],
) -> History:
    """Gives a slot the history of a request: its prompt seen, and the rest of its text emitted.

    Args:
      history: donated by the caller for an update in place.
      slot: the request's.
      tokens: the text; entries at or past text_length are ignored.
      text_length: at most the capacity.
      prompt_length: at most text_length; less only after a preemption.
    """
    vocab_size = history.prompt_seen.shape[1]
    index = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    ids = jnp.where((index < text_length) & (tokens >= 0), tokens, vocab_size)
    emitted = index >= prompt_length
    seen = jnp.zeros((vocab_size,), jnp.bool_)
    seen = seen.at[jnp.where(emitted, vocab_size, ids)].set(True, mode="drop")
    counts = jnp.zeros((vocab_size,), jnp.int32)
    counts = counts.at[jnp.where(emitted, ids, vocab_size)].add(1, mode="drop")
    return History(
        output_counts=history.output_counts.at[slot].set(counts),
        prompt_seen=history.prompt_seen.at[slot].set(seen),
    )


def count_emitted(
    history: History,
    lanes: Int[Array, "lanes"],
    block: Int[Array, "lanes block"],
    emitted: Int[Array, "lanes"],
) -> History:
    """Adds a round's emitted tokens to the output counts.

    Args:
      history: donated by the caller for an update in place.
      lanes: slot of each lane, -1 for padding.
      block: tokens; those at or past emitted[lane] are not counted.
      emitted: tokens that the lane emitted.
    """
    slots, vocab_size = history.output_counts.shape
    index = jax.lax.broadcasted_iota(jnp.int32, block.shape, 1)
    counted = (lanes >= 0)[:, None] & (index < emitted[:, None]) & (block >= 0)
    slot = jnp.where(counted, lanes[:, None], slots)
    counts = history.output_counts.at[slot, jnp.where(counted, block, vocab_size)].add(1, mode="drop")
    return History(output_counts=counts, prompt_seen=history.prompt_seen)
