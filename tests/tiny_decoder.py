"""A decoder of two heads and 8 numbers a token, and random weights for it and its drafters."""

import jax.numpy as jnp
import numpy as np

from jspec.net import Leaf
from jspec.targets.config import DecoderConfig, LayerKind
from jspec.targets.rope import Rope

FLOAT32 = jnp.dtype(jnp.float32)


def decoder(architecture: str, kinds: tuple[LayerKind, ...], vocab_size: int) -> DecoderConfig:
    return DecoderConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=8,
        intermediate_size=12,
        num_layers=len(kinds),
        num_heads=2,
        num_kv_heads=1,
        head_size=4,
        norm_eps=1e-5,
        max_context=64,
        full_rope=Rope(theta=1000.0),
        window_rope=Rope(theta=1000.0),
        layer_kinds=kinds,
        window=5,
        query_key_norm=True,
        query_scale=0.5,
    )


def weights(leaves: tuple[Leaf, ...], seed: int):
    random = np.random.default_rng(seed)
    return tuple(
        jnp.asarray(random.normal(0, 0.6, leaf.shape) + ("norm" in leaf.path), leaf.dtype) for leaf in leaves
    )
