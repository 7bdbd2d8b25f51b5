"""Fresh weights of a drafter that is to be trained, and DFlash 2 weights made of DFlash's."""

import dataclasses
import zlib

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.net import Leaf, Params

INITIALIZER_RANGE = 0.02


def init_dflash_params(
    config: DFlashConfig,
    key: Array,
    dtype: DTypeLike,
    embedding: Float[Array, "vocabulary hidden"] | None = None,
    draft_ids: Int[Array, "draft_vocabulary"] | None = None,
    initializer_range: float = INITIALIZER_RANGE,
) -> Params:
    """Weights to start a training from.

    Matrices and the predecessor codebook are normal, norms one, biases zero. Convolutions pass their
    input on and the successor codebook is zero, so that a fresh DFlash 2 drafts what its DFlash would.

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
    return (deviation * jax.random.normal(key, leaf.shape, jnp.float32)).astype(leaf.dtype)


def _number(path: str) -> int:
    """32 bits of a name, the same in every process."""
    return zlib.crc32(path.encode())
