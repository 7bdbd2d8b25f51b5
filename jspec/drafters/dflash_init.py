"""A drafter that is to be trained: its sizes for a target, fresh weights, DFlash 2 weights made of DFlash's."""

import dataclasses
import math
import zlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash2_layers import Convolution, Selector
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.domino_head import Gru
from jspec.drafters.dspark_heads import Confidence, Markov
from jspec.net import Leaf, Params
from jspec.targets.config import DecoderConfig, LayerKind
from jspec.targets.decoder import decoder_leaves

INITIALIZER_RANGE = 0.02


def dflash_config_for(
    target: DecoderConfig,
    *,
    block_size: int,
    mask_token_id: int,
    target_layer_ids: Sequence[int],
    num_layers: int = 1,
    window: int | None = None,
    layer_kinds: Sequence[LayerKind] | None = None,
    convolution: Convolution | None = None,
    selector: Selector | None = None,
    head: Markov | Gru | None = None,
    confidence: Confidence | None = None,
    anchor_predicts: bool = False,
    draft_vocab_size: int | None = None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
) -> DFlashConfig:
    """The config of a drafter for a target, whose sizes it takes where none are given.

    Args:
      target: reads the drafts.
      block_size: anchor and masks.
      mask_token_id: an id that no text has.
      target_layer_ids: captured states: 0-based layer outputs, -1 = the embedding.
      num_layers: of the drafter.
      window: of its window layers.
      layer_kinds: "full" or "window" per layer; None = all alike, with a window if there is one.
      convolution: DFlash 2's.
      selector: DFlash 2's.
      head: DSpark's or Domino's.
      confidence: DSpark's.
      anchor_predicts: whether row 0 drafts, too.
      draft_vocab_size: drafts only so many ids; None = all.
      intermediate_size: of the drafter's layers; None = the target's, as for the next three.
      num_heads: of the queries.
      num_kv_heads: of keys and values.
      head_size: of all heads.

    Raises:
      ValueError: layers that the target does not have, a window that ends inside of a block, or sizes that do
        not fit each other.
    """
    missing = [i for i in target_layer_ids if not -1 <= i < target.num_layers]
    if missing:
        raise ValueError(
            f"target_layer_ids: expected -1 (the embedding) to {target.num_layers - 1}, got {missing[0]}; "
            f"the target has {target.num_layers} layers"
        )
    if len(set(target_layer_ids)) != len(target_layer_ids):
        raise ValueError(
            f"target_layer_ids: expected different layers, got {list(target_layer_ids)}; drop one"
        )
    head_size = head_size or target.head_size
    if window is not None and window < block_size:
        raise ValueError(
            f"window: expected at least the block of {block_size}, got {window}; in training a block is seen whole, "
            "in decoding it is cut, so widen the window or shorten the block"
        )
    kinds = tuple(layer_kinds or (("full" if window is None else "window"),) * num_layers)
    windows = "window" in kinds
    decoder = DecoderConfig(
        architecture="qwen3",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=num_layers,
        norm_eps=target.norm_eps,
        max_context=target.max_context,
        full_rope=target.full_rope,
        window_rope=target.full_rope if windows else None,
        layer_kinds=kinds,
        window=window if windows else None,
        query_key_norm=True,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_heads=num_heads or target.num_heads,
        num_kv_heads=num_kv_heads or target.num_kv_heads,
        head_size=head_size,
        query_scale=head_size**-0.5,
    )
    return DFlashConfig(
        decoder=decoder,
        block_size=block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(target_layer_ids),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        convolution=convolution,
        selector=selector,
        head=head,
        confidence=confidence,
        anchor_predicts=anchor_predicts,
        draft_vocab_size=draft_vocab_size,
    )


def init_dflash_params(
    config: DFlashConfig,
    key: Array,
    dtype: DTypeLike,
    embedding: Float[Array, "vocabulary hidden"] | None = None,
    draft_ids: Int[Array, "draft_vocabulary"] | None = None,
    initializer_range: float = INITIALIZER_RANGE,
) -> Params:
    """Weights to start a training from.

    Matrices and codebooks are normal, a GRU's uniform in +-1 / sqrt(its size), norms one, biases zero. Convolutions
    pass their input on and the successor codebook is zero, so that a fresh DFlash 2 drafts what its DFlash would.

    Args:
      config: of the drafter.
      key: consumed. A leaf's values depend on the key and the leaf's name alone.
      dtype: of the matrices; norms and base kernels stay float32.
      embedding: [vocabulary, hidden], copied; for a config with an embedding of its own, which has to be
        given one.
      draft_ids: ascending target ids; for a config with a reduced vocabulary.
      initializer_range: standard deviation of the normal leaves.

    Raises:
      ValueError: `embedding` does not go with the config.

    Source: SpecForge, modeling/draft/dflash.py and dflash2.py; there is one difference, the order in which
    random numbers are drawn.
    """
    shape = (config.decoder.vocab_size, config.decoder.hidden_size)
    given = None if embedding is None else embedding.shape
    if given != (shape if config.own_embedding else None):
        wanted = f"an array of shape {list(shape)}" if config.own_embedding else "None"
        raise ValueError(
            f"embedding: expected {wanted}, got {'None' if given is None else f'shape {list(given)}'}; "
            f"the config says own_embedding={config.own_embedding}"
        )
    wanted_ids = None if config.draft_vocab_size is None else (config.draft_vocab_size,)
    if wanted_ids != (None if draft_ids is None else draft_ids.shape):
        raise ValueError(
            f"draft_ids: expected {'None' if wanted_ids is None else f'{wanted_ids[0]} ids'}, got "
            f"{'None' if draft_ids is None else f'shape {list(draft_ids.shape)}'}; the config says "
            f"draft_vocab_size={config.draft_vocab_size}"
        )
    given_leaves = {"embedding": embedding, "draft_ids": draft_ids}
    return tuple(
        jnp.array(given_leaves[leaf.path], leaf.dtype)
        if leaf.path in given_leaves
        else _initial(leaf, jax.random.fold_in(key, _number(leaf.path)), initializer_range)
        for leaf in dflash_leaves(config, jnp.dtype(dtype))
    )


def init_from_target(
    config: DFlashConfig, params: Params, target: DecoderConfig, target_params: Params
) -> Params:
    """Fresh weights with as much of the target in them as fits: fewer updates until drafts are accepted.

    Drafter layer i of n begins as the target's layer i of its last n, the final norm as the target's. What is
    made of the features begins as the last captured state alone, under the norm of the first of these
    layers: if that state is what this layer reads, the context's values are the target's own.
    Norms of queries and keys, convolutions and the selector, which the target does not have, stay.

    Args:
      config: of the drafter.
      params: from `init_dflash_params`.
      target: must have the drafter's sizes.
      target_params: its leaves.

    Raises:
      ValueError: naming a size that differs.
    """
    own = config.decoder
    for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_size", "qkv_bias"):
        if getattr(own, name) != getattr(target, name):
            raise ValueError(
                f"{name}: expected the target's {getattr(target, name)}, got {getattr(own, name)}; a drafter that "
                "begins with the target's layers has their sizes: change it, or start fresh"
            )
    if own.num_layers > target.num_layers:
        raise ValueError(
            f"num_layers: expected at most the target's {target.num_layers}, got {own.num_layers}"
        )
    theirs = dict(
        zip(
            (leaf.path for leaf in decoder_leaves(target, jnp.dtype(jnp.float32))), target_params, strict=True
        )
    )
    first = target.num_layers - own.num_layers
    taken: dict[str, Array] = {
        "norm": theirs["norm"],
        "hidden_norm": theirs[f"layers.{first}.attention_norm"],
    }
    for index in range(own.num_layers):
        prefix = f"layers.{first + index}."
        taken |= {
            f"layers.{index}.{path.removeprefix(prefix)}": value
            for path, value in theirs.items()
            if path.startswith(prefix)
        }
    before = (len(config.target_layer_ids) - 1) * config.target_hidden_size
    taken["fc"] = jnp.eye(before + config.target_hidden_size, own.hidden_size, k=-before)
    return tuple(
        jnp.array(taken[leaf.path], value.dtype) if leaf.path in taken else value
        for leaf, value in zip(dflash_leaves(config, jnp.dtype(jnp.float32)), params, strict=True)
    )


def upgrade_dflash_params(
    plain: DFlashConfig, params: Params, config: DFlashConfig, key: Array, dtype: DTypeLike
) -> Params:
    """DFlash 2 weights that draft the same tokens as the DFlash weights they are made of.

    Args:
      plain: config of `params`.
      params: are copied, cast to `dtype` where `init_dflash_params` would.
      config: of the result: `plain` with what DFlash 2 adds, which starts as in `init_dflash_params`.
      key: consumed.
      dtype: of the matrices.

    Raises:
      ValueError: the configs differ in anything that is in both.
    """
    added = {
        name: getattr(plain, name)
        for name in ("convolution", "selector", "output_multiplier", "final_softcap")
    }
    if dataclasses.replace(config, **added) != plain:
        raise ValueError(
            f"config: expected ({plain.identity}) with a convolution and a selector, got ({config.identity}) "
            "that differs in more; train with the sizes, layers and mask of the weights to start from"
        )
    held = {
        leaf.path: value for leaf, value in zip(dflash_leaves(plain, jnp.dtype(dtype)), params, strict=True)
    }
    return tuple(
        jnp.array(held[leaf.path], leaf.dtype)
        if leaf.path in held
        else _initial(leaf, jax.random.fold_in(key, _number(leaf.path)), INITIALIZER_RANGE)
        for leaf in dflash_leaves(config, jnp.dtype(dtype))
    )


def _initial(leaf: Leaf, key: Array, deviation: float) -> Array:
    name = leaf.path.rpartition(".")[2]
    if name == "base_kernel":
        return jnp.zeros(leaf.shape, leaf.dtype).at[:, 0].set(1)
    if name.endswith("norm"):
        return jnp.ones(leaf.shape, leaf.dtype)
    if name.endswith("bias") or name in ("kernel_projection", "successor_codebook"):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if name.startswith("gru_"):
        return jax.random.uniform(key, leaf.shape, jnp.float32, -1, 1).astype(leaf.dtype) / math.sqrt(
            leaf.shape[1] // 3
        )
    return (deviation * jax.random.normal(key, leaf.shape, jnp.float32)).astype(leaf.dtype)


def _number(path: str) -> int:
    """32 bits of a name, the same in every process."""
    return zlib.crc32(path.encode())
