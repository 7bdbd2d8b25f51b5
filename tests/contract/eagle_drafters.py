"""Real EAGLE drafters for a table target, of random weights."""

import jax
import jax.numpy as jnp

from jspec.drafters.eagle import Eagle, eagle
from jspec.drafters.eagle_init import init_eagle_params
from jspec.drafters.eagle_net import EagleConfig
from jspec.drafters.tree_shape import TreeShape
from jspec.net import Params
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope


def tiny_eagle3(
    vocab_size: int, *, reduced: bool, draft_length: int | None = None, tree: TreeShape | None = None
) -> tuple[Eagle, Params]:
    """With a head of its own, which cannot draft token 0; or its states pick rows of the target's table."""
    decoder = DecoderConfig(
        architecture="llama",
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_size=4,
        norm_eps=1e-6,
        max_context=64,
        full_rope=Rope(theta=100.0),
        layer_kinds=("full",),
        query_scale=0.5,
    )
    config = EagleConfig(
        kind="eagle3",
        decoder=decoder,
        features=("layer.0",),
        target_hidden_size=vocab_size,
        num_target_layers=1,
        draft_vocab_size=vocab_size - 1 if reduced else None,
        own_head=reduced,
        feature_norms=True,
        feeds_back_norm=True,
    )
    params = init_eagle_params(
        config,
        jax.random.key(7),
        jnp.float32,
        draft_ids=jnp.arange(1, vocab_size, dtype=jnp.int32) if reduced else None,
        initializer_range=0.6,
    )
    return eagle(config, draft_length=draft_length, tree=tree), params
