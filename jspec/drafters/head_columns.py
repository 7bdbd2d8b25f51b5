"""A part of the target's head, for drafters that draft a part of the vocabulary."""

from collections.abc import Callable

import jax.core
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_ROWS = 128  # of the identity at a time: bounds what is in memory beside the result


def head_columns(
    logits: Callable[[Array], Array], hidden_size: int, ids: Int[Array, "draft_vocabulary"]
) -> Float[Array, "hidden draft_vocabulary"]:
    """The columns of a target's head that belong to `ids`, a copy: its logits of the identity's rows.

    Args:
      logits: of the target, [rows, hidden] to [rows, vocabulary].
      hidden_size: of the target.
      ids: target ids.

    Raises:
      ValueError: the head is not linear (a soft cap): columns alone would not say its logits.
    """
    pieces = []
    for start in range(0, hidden_size, _ROWS):
        rows = jnp.eye(min(_ROWS, hidden_size - start), hidden_size, k=start, dtype=jnp.float32)
        pieces.append(logits(rows)[:, ids])
    head = jnp.concatenate(pieces)
    linear = jnp.array_equal(logits(64 * jnp.eye(1, hidden_size))[:, ids], 64 * head[:1])
    # Under a trace the values are not known; whoever traces this has made an engine or tables before.
    if not isinstance(linear, jax.core.Tracer) and not linear:
        raise ValueError(
            "draft_vocab_size: expected None for a target whose logits are not linear in its hidden state (a soft "
            "cap), got a reduced vocabulary; train a drafter with the whole vocabulary"
        )
    return head
