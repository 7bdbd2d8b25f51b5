"""The rows of a batch's blocks that draft, one block after the other: what every block objective sums over."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash_net import DFlashConfig, DFlashNet
from jspec.drafters.sequential import Embed
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.block_pass import training_hidden
from jspec.objectives.blocks import Blocks, block_targets
from jspec.objectives.frozen import DraftTables, Tables
from jspec.objectives.soft_labels import check_tables
from pallas_kernels.pytree import pytree


@pytree
class DraftRows:
    """Rows that predict; a row that does not (the anchor's, of most DFlash drafters) never reaches the head."""

    hidden: Float[Array, "blocks drafts hidden"]
    labels: Int[Array, "blocks drafts"]
    columns: Int[Array, "blocks drafts"]  # of the logits; -1 where the label cannot be drafted
    predecessors: Int[Array, "blocks drafts"]  # the token before the label
    before: Int[Array, "blocks drafts"]  # where it stands: token row times tokens + place in it
    mask: Float[Array, "blocks drafts"]  # 1 where the label is supervised


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
      ValueError: the tables are not those of the drafter's vocabulary.
    """
    check_tables(config.draft_vocab_size, target)
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
        columns=target.columns[labels] if isinstance(target, DraftTables) else labels,
        predecessors=flat(targets.predecessors),
        before=flat(targets.before + starts),
        mask=flat(targets.mask).astype(jnp.float32),
    )


def training_embed(net: DFlashNet, target: Tables) -> Embed:
    """What the network reads of token ids: the target's embeddings, or its own."""
    table = None if net.embedding is None else net.embedding[...]
    return target.embed if table is None else lambda ids: jnp.take(table, ids, axis=0)


def check_window(config: DFlashConfig) -> None:
    """Refuses window layers whose window ends inside of a block.

    Raises:
      ValueError: a row could not see its own block.
    """
    window = config.decoder.window
    if "window" in config.decoder.layer_kinds and window is not None and window < config.block_size:
        raise ValueError(
            f"window: expected at least the block of {config.block_size}, got {window}; "
            "a row could not see its own block"
        )
