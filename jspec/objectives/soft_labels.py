"""The target's distribution as a label: what is learned of it, and how well a drafter agrees with it.

A drafter of a reduced vocabulary learns the distribution over its own ids, normalised among them; how much of
it the target would accept is measured against the target's own probabilities. For that the normaliser over
the whole vocabulary and the best id are read from the target's head, a few rows at a time.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.objectives.frozen import DraftTables, Tables
from jspec.objectives.rollouts import taken
from pallas_kernels.pytree import pytree
from pallas_kernels.vocabulary_row.choices import argmax

_ROWS = 128  # rows of the whole vocabulary that are in memory at a time


@pytree
class Teacher:
    """What the target says after every token, without a table of [tokens, vocabulary]."""

    states: Float[Array, "rows tokens hidden"]  # what its head reads
    # Of a reduced vocabulary, else of no tokens; 0 where nobody asks:
    logits: Float[Array, "rows read drafted"]  # of the ids that can be drafted
    log_normaliser: Float[Array, "rows read"]  # over the whole vocabulary
    best: Int[Array, "rows read"]  # most probable id, the lowest on ties


@pytree
class SoftLabels:
    """The target's distribution for some rows."""

    logits: Float[Array, "rows drafted"]  # of the ids that can be drafted
    log_normaliser: Float[Array, "rows"]  # over the whole vocabulary
    columns: Int[Array, "rows"]  # of `logits`: the target's best id; -1 = cannot be drafted


@pytree
class Agreement:
    """How drafted distributions compare with the labels, row by row."""

    cross_entropy: Float[Array, "rows"]  # KL plus the label's entropy, which nothing can change
    acceptance: Float[Array, "rows"]  # sum of min(target, drafter): P(a draft drawn from it is accepted)
    known: Bool[Array, "rows"]  # the target's best id can be drafted
    correct: Bool[Array, "rows"]  # and is the drafter's best


def read_teacher(
    target: Tables,
    states: Float[Array, "rows tokens hidden"],
    wanted: Bool[Array, "rows tokens"],
    *,
    chunk: int = _ROWS,
) -> Teacher:
    """Reads what a reduced vocabulary needs to know of the wanted tokens; no gradient flows into the target.

    Only `chunk` rows of the whole vocabulary exist at a time, and chunks in which nothing is wanted are not
    computed.

    Args:
      target: its head.
      states: in front of the head ("final_norm").
      wanted: tokens whose distribution is learned.
      chunk: rows at a time.
    """
    states = jax.lax.stop_gradient(states)
    rows, tokens = wanted.shape
    if not isinstance(target, DraftTables):
        none = jnp.zeros((rows, 0), jnp.float32)
        return Teacher(
            states=states, logits=none[:, :, None], log_normaliser=none, best=none.astype(jnp.int32)
        )
    drafted = target.head.shape[1]
    chunk = min(chunk, rows * tokens)
    pieces = -(-rows * tokens // chunk)
    order = jnp.argsort(~wanted.reshape(-1), stable=True)
    order = jnp.pad(order, (0, pieces * chunk - rows * tokens), mode="edge").reshape(pieces, chunk)
    flat, asked = states.reshape(rows * tokens, -1), wanted.reshape(-1)

    def read(index: Array) -> tuple[Array, Array, Array]:
        logits = target.tables.logits(flat[index])
        return target.logits(flat[index]), jax.nn.logsumexp(logits, axis=-1), argmax(logits)

    def skipped(index: Array) -> tuple[Array, Array, Array]:
        none = jnp.zeros((chunk,), jnp.float32)
        return jnp.zeros((chunk, drafted), jnp.float32), none, none.astype(jnp.int32)

    found = jax.lax.map(lambda index: jax.lax.cond(jnp.any(asked[index]), read, skipped, index), order)

    def back(values: Array) -> Array:
        shape = values.shape[2:]
        out = jnp.zeros((rows * tokens, *shape), values.dtype)
        out = out.at[order.reshape(-1)].set(values.reshape(-1, *shape))
        return out.reshape(rows, tokens, *shape)

    logits, log_normaliser, best = jax.lax.stop_gradient(found)
    return Teacher(
        states=states,
        logits=back(logits),
        log_normaliser=back(log_normaliser),
        best=jnp.maximum(back(best), 0),
    )


def soft_labels(target: Tables, teacher: Teacher, index: Int[Array, "rows places"]) -> SoftLabels:
    """The labels of tokens `index` of each row, one after the other."""
    if isinstance(target, DraftTables):
        normaliser, best = taken(teacher.log_normaliser, index), taken(teacher.best, index)
        logits = taken(teacher.logits, index)
        labels = SoftLabels(
            logits=logits.reshape(-1, logits.shape[2]),
            log_normaliser=normaliser.reshape(-1),
            columns=target.columns[best.reshape(-1)],
        )
    else:
        states = taken(teacher.states, index)
        logits = target.logits(states.reshape(-1, states.shape[2]))
        labels = SoftLabels(
            logits=logits, log_normaliser=jax.nn.logsumexp(logits, axis=-1), columns=argmax(logits)
        )
    return jax.lax.stop_gradient(labels)


def agreement(logits: Float[Array, "rows drafted"], labels: SoftLabels) -> Agreement:
    """Compares the drafter's logits with the labels; gradients flow into both real-valued results."""
    drafter = jax.nn.logsumexp(logits, axis=-1)
    among_drafted = jax.nn.logsumexp(labels.logits, axis=-1)
    wanted = jnp.exp(labels.logits - among_drafted[:, None])
    target = jnp.exp(labels.logits - labels.log_normaliser[:, None])
    return Agreement(
        cross_entropy=drafter - jnp.sum(wanted * logits, axis=-1),
        acceptance=jnp.sum(jnp.minimum(target, jnp.exp(logits - drafter[:, None])), axis=-1),
        known=labels.columns >= 0,
        correct=(labels.columns >= 0) & (argmax(jax.lax.stop_gradient(logits)) == labels.columns),
    )


def agreement_rows(agreed: Agreement, supervised: Bool[Array, "rows"]) -> dict[str, Array]:
    """What every loss adds up over rows: 0 where a row does not count.

    A supervised row whose best id cannot be drafted is not `known`: it counts as missed, and nowhere else.
    """
    known = supervised & agreed.known
    return {
        "supervised": supervised,
        "known": known,
        "cross_entropy": jnp.where(known, agreed.cross_entropy, 0),
        "acceptance": jnp.where(known, agreed.acceptance, 0),
        "correct": known & agreed.correct,
    }


def agreement_metrics(sums: Mapping[str, Array]) -> dict[str, tuple[Array, Array]]:
    """The metrics of a loss whose rows were added up under the names of `agreement_rows`."""
    supervised, known, correct = sums["supervised"], sums["known"], sums["correct"]
    return {
        "cross_entropy": (sums["cross_entropy"], known),
        "accuracy": (correct, supervised),
        "accuracy_of_drafted": (correct, known),
        "drafted": (known, supervised),
        "acceptance": (sums["acceptance"], known),
    }


def check_tables(draft_vocab_size: int | None, target: Tables) -> None:
    """Makes sure that logits of drafter and target have the same columns.

    Raises:
      ValueError: a reduced vocabulary without its tables, or the other way round.
    """
    if isinstance(target, DraftTables) != (draft_vocab_size is not None):
        raise ValueError(
            f"target: expected {'DraftTables' if draft_vocab_size else 'tables of the whole vocabulary'} for a "
            f"drafter with draft_vocab_size {draft_vocab_size}, got {type(target).__name__}; "
            "see jspec.objectives.frozen.draft_tables"
        )
