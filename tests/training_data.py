"""A tiny target and drafter to train, and random documents for them."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.dflash_init import init_dflash_params
from jspec.drafters.dflash_net import DFlashConfig
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.frozen import FrozenTarget
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves
from jspec.targets.rope import Rope
from jspec_train.drafters import drafter_config
from jspec_train.recipe_parts import DrafterPart

VOCABULARY, HIDDEN = 32, 16


def target_config() -> DecoderConfig:
    return DecoderConfig(
        architecture="llama",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_layers=6,
        num_heads=4,
        num_kv_heads=2,
        head_size=4,
        norm_eps=1e-5,
        max_context=64,
        full_rope=Rope(theta=10000.0),
        layer_kinds=("full",) * 6,
        query_scale=0.5,
    )


def tiny_target(seed: int = 0) -> FrozenTarget:
    target = DecoderTarget(target_config())
    return FrozenTarget(
        params=random_params(decoder_leaves(target.config, jnp.dtype(jnp.float32)), seed), target=target
    )


def random_params(leaves, seed: int) -> Params:
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    return tuple(
        jnp.ones(leaf.shape) if leaf.path.endswith("norm") else 0.3 * jax.random.normal(key, leaf.shape)
        for key, leaf in zip(keys, leaves, strict=True)
    )


def tiny_drafter(part: DrafterPart | None = None, seed: int = 1) -> tuple[DFlashConfig, Params]:
    part = DrafterPart(num_layers=2, block_size=4, intermediate_size=24) if part is None else part
    config = drafter_config(part, target_config(), mask_token_id=VOCABULARY - 1)
    return config, init_dflash_params(config, jax.random.key(seed), jnp.float32, initializer_range=0.2)


def documents(rows: int, tokens: int, width: int, seed: int = 2) -> TrainBatch:
    """Rows of one document each, of different lengths, with a prompt that is not supervised."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(tokens // 2, tokens + 1, rows)
    index = np.broadcast_to(np.arange(tokens, dtype=np.int32), (rows, tokens))
    inside = index < lengths[:, None]
    return TrainBatch(
        ids=jnp.asarray(np.where(inside, rng.integers(0, VOCABULARY - 1, (rows, tokens)), 0), jnp.int32),
        loss_mask=jnp.asarray(inside & (index >= 4)),
        segments=jnp.asarray(inside, jnp.int32),
        positions=jnp.asarray(np.where(inside, index, 0)),
        features=jnp.asarray(rng.normal(size=(rows, tokens, width)) * inside[:, :, None], jnp.float32),
    )
