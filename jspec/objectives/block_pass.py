"""A DFlash block pass over known text: every anchor's block at once, without a cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash_net import DFlashConfig, DFlashNet
from jspec.heads import attend_blocks
from jspec.objectives.batch import TrainBatch
from jspec.objectives.blocks import Blocks, BlockTargets
from jspec.targets.config import LayerKind
from jspec.targets.layers import See


def training_hidden(
    net: DFlashNet,
    embed: Callable[[Array], Array],
    batch: TrainBatch,
    blocks: Blocks,
    targets: BlockTargets,
) -> Float[Array, "rows blocks block hidden"]:
    """Hidden states of all blocks, after the final norm: what decoding would see at each anchor.

    Args:
      net: the drafter.
      embed: the target's input embedding, or the drafter's own.
      batch: tokens and features.
      blocks: anchors.
      targets: positions of the block rows.
    """
    config = net.config
    rows, num_blocks, block_size = targets.positions.shape
    tokens = batch.ids.shape[1]
    anchors = jnp.take_along_axis(batch.ids, blocks.anchors, axis=1)
    first = jax.lax.broadcasted_iota(jnp.int32, targets.positions.shape, 2) == 0
    ids = jnp.where(first & blocks.keep[:, :, None], anchors[:, :, None], config.mask_token_id)
    features = batch.features.reshape(rows * tokens, -1)
    k, v = net.context_rows(features, batch.positions.reshape(-1))
    k, v = (x.reshape(x.shape[0], rows, tokens, *x.shape[2:]) for x in (k, v))

    starts, ends = context_limits(batch, blocks)

    def see(index: int, kind: LayerKind) -> See:
        return attended(config, kind, k[index], v[index], starts, ends, block_size)

    hidden = net.block(embed(ids.reshape(-1)), targets.positions.reshape(-1), see)
    return hidden.reshape(rows, num_blocks, block_size, -1)


def context_limits(
    batch: TrainBatch, blocks: Blocks
) -> tuple[Int[Array, "rows blocks"], Int[Array, "rows blocks"]]:
    """Which tokens' features a block sees: its own document's before the anchor.

    Returns:
      The place of the first one, and that of the anchor; both 0 where no block is.
    """
    place = jax.lax.broadcasted_iota(jnp.int32, batch.segments.shape, 1)
    begins = batch.segments != jnp.roll(batch.segments, 1, axis=1)
    document_starts = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    starts = jnp.take_along_axis(document_starts, blocks.anchors, axis=1)
    return jnp.where(blocks.keep, starts, 0), jnp.where(blocks.keep, blocks.anchors, 0)


def attended(
    config: DFlashConfig,
    kind: LayerKind,
    k_context: Float[Array, "rows tokens kv_heads head_size"],
    v_context: Float[Array, "rows tokens kv_heads head_size"],
    starts: Int[Array, "rows blocks"],
    ends: Int[Array, "rows blocks"],
    block_size: int,
) -> See:
    """Attention of all blocks over their context and each over itself.

    The last `window` positions count the row itself, as everywhere. Unlike in decoding (see
    `jspec.drafters.dflash_net.block_sights`), a window smaller than the block does not cut the block.

    Source: SpecForge a6b6b023, sliding layers of its block masks.
    """
    decoder = config.decoder

    def see(q: Array, k: Array, v: Array) -> Array:
        q, k, v = (x.reshape(*starts.shape, block_size, *x.shape[1:]) for x in (q, k, v))
        out = attend_blocks(
            q,
            k,
            v,
            k_context,
            v_context,
            starts,
            ends,
            scale=decoder.query_scale,
            causal=config.causal(kind),
            window=decoder.window if kind == "window" else None,
        )
        return out.reshape(-1, decoder.num_heads, decoder.head_size)

    return see
