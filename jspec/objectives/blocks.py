"""Which blocks a block drafter is trained on, and what every row of a block reads and predicts.

Row j of the block at anchor a (an index into the token row):

| row | reads          | at position       | predicts    | predecessor   | weight                        |
|-----|----------------|-------------------|-------------|---------------|-------------------------------|
| 0   | token a        | positions[a]      | nothing     | -             | 0                             |
| j   | the mask token | positions[a] + j  | token a + j | token a+j - 1 | loss_mask[a+j], same document |

If the anchor's row predicts, every row j predicts token a + j + 1 instead, whose predecessor is token a + j.
The token before a label is also where the target's distribution of the label is read.
Every row sees the features of tokens before a, strictly, of its own document, and its own block.
The feature of the anchor stays hidden: while decoding, the target has not executed it yet.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.objectives.batch import TrainBatch
from pallas_kernels.pytree import pytree


@pytree
class Blocks:
    """The chosen anchors of every row."""

    anchors: Int[Array, "rows blocks"]  # index into the token row, ascending; 0 where nothing is kept
    keep: Bool[Array, "rows blocks"]  # False: a place that no anchor was found for


@pytree
class BlockTargets:
    """Labels and masks of every row of every block; see the table above."""

    labels: Int[Array, "rows blocks block"]
    predecessors: Int[Array, "rows blocks block"]
    before: Int[Array, "rows blocks block"]  # place of the predecessor in the token row
    mask: Bool[Array, "rows blocks block"]
    positions: Int[Array, "rows blocks block"]


def eligible_anchors(batch: TrainBatch) -> Bool[Array, "rows tokens"]:
    """Tokens that may be an anchor: supervised, and the next one of the same document is, too."""
    supervised = batch.loss_mask & (batch.segments > 0)
    following = jnp.roll(supervised, -1, axis=1) & (jnp.roll(batch.segments, -1, axis=1) == batch.segments)
    last = jax.lax.broadcasted_iota(jnp.int32, supervised.shape, 1) == supervised.shape[1] - 1
    return supervised & following & ~last


def choose_anchors(batch: TrainBatch, uniforms: Float[Array, "rows tokens"], *, num_anchors: int) -> Blocks:
    """Up to `num_anchors` distinct random anchors a row: those with the smallest uniform numbers.

    Args:
      batch: the documents.
      uniforms: one random number in [0, 1) per token.
      num_anchors: places per row; those that find no anchor are marked, never filled twice.

    Raises:
      ValueError: more anchors than a row has tokens.

    Source: SpecForge a6b6b023, `OnlineDFlashModel`; there the number of places shrinks with the
    data, here it is static, and what is not kept has weight 0.
    """
    tokens = batch.ids.shape[1]
    if not 1 <= num_anchors < tokens:
        raise ValueError(
            f"num_anchors: expected 1 to {tokens - 1} for rows of {tokens} tokens, got {num_anchors}; "
            "lower it or use longer rows"
        )
    eligible = eligible_anchors(batch)
    _, index = jax.lax.top_k(jnp.where(eligible, -uniforms, -2.0), num_anchors)
    kept = jnp.take_along_axis(eligible, index, axis=1)
    order = jnp.sort(jnp.where(kept, index, tokens), axis=1)
    keep = order < tokens
    return Blocks(anchors=jnp.where(keep, order, 0), keep=keep)


def block_targets(
    batch: TrainBatch, blocks: Blocks, *, block_size: int, anchor_predicts: bool = False
) -> BlockTargets:
    """What the rows of every block predict and at which positions they stand.

    Args:
      batch: the documents.
      blocks: anchors.
      block_size: rows of a block.
      anchor_predicts: static; whether row 0 predicts.
    """
    rows, tokens = batch.ids.shape
    offset = jax.lax.broadcasted_iota(jnp.int32, (1, 1, block_size), 2)
    row = blocks.anchors[:, :, None] + offset
    label = row + 1 if anchor_predicts else row
    inside = label < tokens

    def at(values: Array, index: Array) -> Array:
        index = jnp.clip(index, 0, tokens - 1)
        return jnp.take_along_axis(values, index.reshape(rows, -1), axis=1).reshape(index.shape)

    document = at(batch.segments, blocks.anchors)
    mask = inside & at(batch.loss_mask, label) & (at(batch.segments, label) == document[:, :, None])
    before = jnp.clip(label - 1, blocks.anchors[:, :, None], tokens - 1)
    return BlockTargets(
        labels=at(batch.ids, label),
        predecessors=at(batch.ids, before),
        before=before,
        mask=mask & (label > blocks.anchors[:, :, None]) & blocks.keep[:, :, None],
        positions=at(batch.positions, blocks.anchors)[:, :, None] + offset,
    )


def draft_weights(num_drafts: int, gamma: float | None) -> Float[Array, "drafts"]:
    """exp(-d / gamma) for draft token d, counted from 0: early ones decide more often. None: all alike.

    Raises:
      ValueError: gamma is not positive.
    """
    if gamma is None:
        return jnp.ones((num_drafts,), jnp.float32)
    if not gamma > 0:
        raise ValueError(
            f"gamma: expected a positive number or None, got {gamma}; None weighs all rows alike"
        )
    return jnp.exp(-jnp.arange(num_drafts, dtype=jnp.float32) / gamma)
