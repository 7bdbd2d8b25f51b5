"""What a drafter predicts of given tokens."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.objectives.draft_rows import at_labels
from jspec.objectives.frozen import Tables, columns_of
from pallas_kernels.pytree import pytree


@pytree
class Predictions:
    """Of every drafted row."""

    correct: Bool[Array, "*texts anchors drafts"]  # the best token is the label
    loss: Float[Array, "*texts anchors drafts"]  # cross-entropy in nats
    known: Bool[Array, "*texts anchors drafts"]  # the label can be drafted


def predictions_of(
    logits: Float[Array, "anchors drafts columns"], labels: Int[Array, "anchors drafts"], tables: Tables
) -> Predictions:
    """What rows say of the tokens that they are asked for.

    Args:
      logits: of the ids that can be drafted.
      labels: target ids.
      tables: that say which column is whose.
    """
    columns = columns_of(tables, labels)
    return Predictions(
        correct=jnp.argmax(logits, axis=2) == columns,
        loss=jax.nn.logsumexp(logits, axis=2) - at_labels(logits, columns),
        known=columns >= 0,
    )
