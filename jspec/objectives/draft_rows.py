"""The rows of a batch's blocks that draft, block after block: what every block objective sums over."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash_net import DFlashConfig, DFlashNet, draft_logits
from jspec.drafters.sequential import Embed
from jspec.features import layer_outputs
from jspec.net import Params
from jspec.objectives.batch import TrainBatch, check_features
from jspec.objectives.block_pass import training_hidden
from jspec.objectives.blocks import Blocks, block_targets
from jspec.objectives.frozen import Tables, columns_of
from jspec.objectives.live_chunks import summed_over_live_chunks
from jspec.objectives.soft_labels import check_tables
from pallas_kernels.pytree import pytree


@pytree
class DraftRows:
    """Rows that predict; one that does not (the anchor's, of most DFlash drafters) never reaches the head."""

    hidden: Float[Array, "blocks drafts hidden"]
    labels: Int[Array, "blocks drafts"]
    columns: Int[Array, "blocks drafts"]  # of the logits; -1 where the label cannot be drafted
    predecessors: Int[Array, "blocks drafts"]  # the token before the label
    before: Int[Array, "blocks drafts"]  # where it stands: token row times tokens + place in it
    mask: Bool[Array, "blocks drafts"]  # the label is supervised


def draft_rows(
    config: DFlashConfig,
    params: Params,
    target: Tables,
    batch: TrainBatch,
    blocks: Blocks,
    *,
    recompute: bool,
) -> DraftRows:
    """Runs the backbone over all blocks.

    Args:
      config: of the drafter.
      params: its leaves.
      target: embedding and head; `DraftTables` for a reduced vocabulary.
      batch: tokens, and features of the states that the drafter reads, no others.
      blocks: anchors.
      recompute: static; the pass again in the backward pass, instead of keeping its activations.

    Raises:
      ValueError: features of another width, or tables of another vocabulary.
    """
    check_tables(config.draft_vocab_size, target)
    check_features(batch, layer_outputs(config.target_layer_ids), config.target_hidden_size)
    tokens = batch.ids.shape[1]
    targets = block_targets(
        batch, blocks, block_size=config.block_size, anchor_predicts=config.anchor_predicts
    )
    embed = training_embed(dflash_net(config, params), target)

    def hidden_of(params: Params, features: Array) -> Array:
        seen = dataclasses.replace(batch, features=features)
        return training_hidden(dflash_net(config, params), embed, seen, blocks, targets)

    hidden = (jax.checkpoint(hidden_of) if recompute else hidden_of)(params, batch.features)
    drafts = config.longest_draft

    def flat(array: Array) -> Array:
        return array[:, :, -drafts:].reshape(-1, drafts, *array.shape[3:])

    labels = flat(targets.labels)
    starts = tokens * jax.lax.broadcasted_iota(jnp.int32, targets.before.shape, 0)
    return DraftRows(
        hidden=flat(hidden),
        labels=labels,
        columns=columns_of(target, labels),
        predecessors=flat(targets.predecessors),
        before=flat(targets.before + starts),
        mask=flat(targets.mask),
    )


def summed_over_blocks(
    sums_of: Callable[[Params, Any, DraftRows], tuple[Float[Array, ""], dict[str, Array]]],
    params: Params,
    constants: Any,
    rows: DraftRows,
    *,
    chunk: int,
) -> tuple[Float[Array, ""], dict[str, Array]]:
    """Sums sums_of(params, constants, some blocks) over the blocks that have something supervised.

    Args:
      sums_of: to (numerator, further sums), without traced arrays of its own.
      params: leaves of the drafter; gradients flow to them and to the rows' hidden states.
      constants: what else `sums_of` needs; no gradient flows to it.
      rows: of all blocks.
      chunk: blocks whose logits are in memory at a time.

    Returns:
      As `jspec.objectives.live_chunks.summed_over_live_chunks`.
    """
    live = jnp.any(rows.mask, axis=1)
    first = jnp.argsort(~live, stable=True)
    ordered = jax.tree.map(lambda array: array[first], rows)
    return summed_over_live_chunks(sums_of, params, constants, ordered, live, chunk=chunk)


def training_embed(net: DFlashNet, target: Tables) -> Embed:
    """What the network reads of token ids: the target's embeddings, or its own."""
    table = None if net.embedding is None else net.embedding[...]
    return target.embed if table is None else lambda ids: jnp.take(table, ids, axis=0)


def row_logits(
    config: DFlashConfig, target: Tables, hidden: Float[Array, "blocks drafts hidden"]
) -> Float[Array, "blocks drafts columns"]:
    """What the target's head makes of the rows, as the drafter uses it; no head of the drafter is in it."""
    blocks, drafts, _ = hidden.shape
    return draft_logits(config, target.logits(hidden.reshape(blocks * drafts, -1))).reshape(
        blocks, drafts, -1
    )


def at_labels(
    values: Float[Array, "blocks drafts columns"], columns: Int[Array, "blocks drafts"]
) -> Float[Array, "blocks drafts"]:
    """The value of each label; that of column 0 where the label cannot be drafted."""
    return jnp.take_along_axis(values, jnp.maximum(columns, 0)[:, :, None], axis=-1)[:, :, 0]


def hits(scores: Float[Array, "blocks drafts columns"], rows: DraftRows) -> Float[Array, "blocks drafts"]:
    """1 where a row is supervised and its label has the best score. One that cannot be drafted is missed."""
    return ((jnp.argmax(scores, axis=-1) == rows.columns) & rows.mask).astype(jnp.float32)
