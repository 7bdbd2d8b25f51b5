"""Domino's head: a GRU over the tokens of the block, whose state corrects the logits of later rows.

Source: SpecForge a6b6b023, modeling/draft/domino.py; SGLang 0.5.23, speculative/domino_utils.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.drafters.sequential import Embed
from jspec.targets.config import DecoderConfig
from jspec.targets.layers import project_float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gru:
    """Sizes of a Domino head."""

    size: int  # of the state
    rank: int  # width of the latent
    first_corrected: int = 1  # rows before this one keep their logits

    def check(self) -> None:
        """Refuses sizes that cannot be.

        Raises:
          ValueError: naming the field.
        """
        for name, least in (("size", 1), ("rank", 1), ("first_corrected", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"head.{name}: expected at least {least}, got {getattr(self, name)}")

    @property
    def identity(self) -> str:
        """To name it in refusals."""
        return f"GRU head of size {self.size} and rank {self.rank}"


class GruHead(nnx.Module):
    """A `jspec.drafters.sequential.SequentialHead` of a `Gru`: latent = silu([h; s] P), s float32.

    s' = (1 - z) n + z s, with r, z = sigmoid(x I + s S) and n = tanh(x I + r * (s S)), x the embedding of the
    token before that the backbone would read. It has no biases; the columns of I and S are r, z, n.
    """

    def __init__(self, config: DecoderConfig, sizes: Gru, columns: int, dtype: jnp.dtype):
        self.sizes = sizes
        hidden = config.hidden_size
        reduced = "vocabulary" if columns == config.vocab_size else "draft_vocabulary"

        def zeros(shape: tuple[int, int], *axes: str) -> nnx.Param[Any]:
            return nnx.Param(jnp.zeros(shape, dtype), axes=axes)

        self.gru_input = zeros((hidden, 3 * sizes.size), "hidden", "state")
        self.gru_state = zeros((sizes.size, 3 * sizes.size), "state", "state")
        self.mix = zeros((hidden + sizes.size, sizes.rank), "mixed", "rank")
        self.output = zeros((sizes.rank, columns), "rank", reduced)

    def read(self, tokens: Int[Array, "*rows"], embed: Embed) -> Float[Array, "*rows hidden"]:
        """The backbone's embedding of the tokens before."""
        return embed(tokens).astype(self.gru_input[...].dtype)

    def project(self, hidden: Float[Array, "*rows hidden"]) -> Float[Array, "*rows rank"]:
        """The hidden states' part of the latent."""
        size = hidden.shape[-1]
        flat = project_float32(hidden.reshape(-1, size), self.mix[...][:size])
        return flat.reshape(*hidden.shape[:-1], -1)

    def start(self, blocks: int) -> Float[Array, "blocks size"]:
        """Zeros."""
        return jnp.zeros((blocks, self.sizes.size), jnp.float32)

    def step(
        self,
        state: Float[Array, "blocks size"],
        projected: Float[Array, "blocks rank"],
        read: Float[Array, "blocks hidden"],
        row: Int[Array, ""],
    ) -> tuple[Float[Array, "blocks size"], Float[Array, "blocks rank"]]:
        """See `GruHead`; rows before the first corrected one have a latent of zeros."""
        dtype, size = self.gru_input[...].dtype, self.sizes.size
        own = project_float32(state.astype(dtype), self.gru_state[...])
        seen = project_float32(read, self.gru_input[...])
        reset, update = jnp.split(jax.nn.sigmoid((seen + own)[:, : 2 * size]), 2, axis=1)
        new = jnp.tanh(seen[:, 2 * size :] + reset * own[:, 2 * size :])
        state = (1 - update) * new + update * state
        latent = jax.nn.silu(projected + project_float32(state.astype(dtype), self.mix[...][-size:]))
        return state, jnp.where(row >= self.sizes.first_corrected, latent, 0)
