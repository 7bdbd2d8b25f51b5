"""The decoder layers that only EAGLE drafters have."""

from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array

from jspec.targets.config import DecoderConfig
from jspec.targets.layers import Attention, Mlp, Rotation, See, norm_weight, rms_norm


class BareLayer(nnx.Module):
    """A Llama layer without its input norm: EAGLE's first."""

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype):
        self.eps = config.norm_eps
        self.attention = Attention(config, dtype)
        self.mlp_norm = norm_weight(config)
        self.mlp = Mlp(config, dtype)

    def __call__(
        self, x: Array, rotation: Rotation, see: See, kv_dtype: Any = None
    ) -> tuple[Array, Array, Array]:
        """Returns the layer's output and the rows' keys and values."""
        out, k, v = self.attention(x, rotation, see, kv_dtype)
        x = x + out
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps)), k, v


class WideLayer(nnx.Module):
    """EAGLE-3's layer: queries, keys and values are made of an embedding and a state side by side."""

    def __init__(self, config: DecoderConfig, dtype: jnp.dtype, *, norm_before_residual: bool):
        self.eps = config.norm_eps
        self.norm_before_residual = norm_before_residual
        self.embedding_norm = norm_weight(config)
        self.state_norm = norm_weight(config)
        self.attention = Attention(config, dtype, inputs="embedding_and_hidden")
        self.mlp_norm = norm_weight(config)
        self.mlp = Mlp(config, dtype)

    def __call__(
        self, embeddings: Array, states: Array, rotation: Rotation, see: See, kv_dtype: Any = None
    ) -> tuple[Array, Array, Array]:
        """Returns the next states and the rows' keys and values."""
        normed = rms_norm(states, self.state_norm[...], self.eps)
        both = jnp.concatenate([rms_norm(embeddings, self.embedding_norm[...], self.eps), normed], axis=1)
        out, k, v = self.attention(both, rotation, see, kv_dtype)
        x = (normed if self.norm_before_residual else states) + out
        return x + self.mlp(rms_norm(x, self.mlp_norm[...], self.eps)), k, v
