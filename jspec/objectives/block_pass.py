"""A DFlash block pass over known text: every anchor's block at once, without a cache."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jspec.drafters.dflash_net import DFlashConfig, DFlashNet
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

    def see(index: int, kind: LayerKind) -> See:
        visible = context_mask(config, kind, batch, blocks, block_size)
        inside = block_mask(config, kind, block_size)
        return dense_blocks(config, k[index], v[index], visible, inside)

    hidden = net.block(embed(ids.reshape(-1)), targets.positions.reshape(-1), see)
    return hidden.reshape(rows, num_blocks, block_size, -1)


def context_mask(
    config: DFlashConfig, kind: LayerKind, batch: TrainBatch, blocks: Blocks, block_size: int
) -> Bool[Array, "rows blocks block tokens"]:
    """Which tokens' features a block row sees: its own document's before the anchor, within a window.

    The last `window` positions count the row itself, as everywhere.
    """
    tokens = batch.ids.shape[1]
    index = jax.lax.broadcasted_iota(jnp.int32, (1, 1, 1, tokens), 3)
    anchors = blocks.anchors[:, :, None, None]
    document = jnp.take_along_axis(batch.segments, blocks.anchors, axis=1)[:, :, None, None]
    visible = (index < anchors) & (batch.segments[:, None, None, :] == document)
    visible = visible & blocks.keep[:, :, None, None]
    if kind == "window":
        assert config.decoder.window is not None
        row = anchors + jax.lax.broadcasted_iota(jnp.int32, (1, 1, block_size, 1), 2)
        return visible & (index > row - config.decoder.window)
    return jnp.broadcast_to(visible, (*blocks.anchors.shape, block_size, tokens))


def block_mask(config: DFlashConfig, kind: LayerKind, block_size: int) -> Bool[Array, "block block"]:
    """Which rows of its own block a row sees."""
    row = jax.lax.broadcasted_iota(jnp.int32, (block_size, block_size), 0)
    column = jax.lax.broadcasted_iota(jnp.int32, (block_size, block_size), 1)
    return (column <= row) if config.causal(kind) else jnp.ones((block_size, block_size), jnp.bool_)


def dense_blocks(
    config: DFlashConfig,
    k_context: Float[Array, "rows tokens kv_heads head_size"],
    v_context: Float[Array, "rows tokens kv_heads head_size"],
    visible: Bool[Array, "rows blocks block tokens"],
    inside: Bool[Array, "block block"],
) -> See:
    """Attention of all blocks of a row over its context and each over itself, one softmax over both."""
    rows, num_blocks, block_size, _ = visible.shape
    decoder = config.decoder
    kv_heads, group = decoder.num_kv_heads, decoder.num_heads // decoder.num_kv_heads
    scale = decoder.query_scale

    def see(q: Array, k: Array, v: Array) -> Array:
        shape = (rows, num_blocks, block_size, kv_heads)
        q = q.reshape(*shape, group, -1)
        k, v = k.reshape(*shape, -1), v.reshape(*shape, -1)
        context = jnp.einsum("rnjkgd,rtkd->rkgnjt", q, k_context, preferred_element_type=jnp.float32)
        own = jnp.einsum("rnjkgd,rnikd->rkgnji", q, k, preferred_element_type=jnp.float32)
        context = jnp.where(visible[:, None, None], context * scale, -jnp.inf)
        own = jnp.where(inside[None, None, None, None], own * scale, -jnp.inf)
        # Every row sees itself, so the maximum is finite.
        top = jnp.maximum(jnp.max(context, axis=-1), jnp.max(own, axis=-1))[..., None]
        top = jax.lax.stop_gradient(top)
        context, own = jnp.exp(context - top), jnp.exp(own - top)
        total = jnp.sum(context, axis=-1) + jnp.sum(own, axis=-1)
        out = jnp.einsum("rkgnjt,rtkd->rnjkgd", context.astype(v.dtype), v_context)
        out = out + jnp.einsum("rkgnji,rnikd->rnjkgd", own.astype(v.dtype), v)
        total = jnp.moveaxis(total, (1, 2), (3, 4))[..., None]
        return (out / total).astype(q.dtype).reshape(-1, decoder.num_heads, decoder.head_size)

    return see
