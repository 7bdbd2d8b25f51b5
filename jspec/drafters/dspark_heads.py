"""The heads that DSpark adds to a DFlash backbone: a Markov head on the logits, and a confidence head.

Source: DSpark (arXiv 2607.05147), section 3.1; deepseek-ai/DeepSpec, modeling/dspark; SGLang 0.5.23,
models/dspark.py.
"""

import dataclasses
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.drafters.sequential import Embed
from jspec.targets.config import DecoderConfig
from jspec.targets.layers import project_float32

MarkovKind = Literal["vanilla", "gated", "rnn"]
MARKOV_KINDS: tuple[str, ...] = get_args(MarkovKind)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Markov:
    """Sizes of a Markov head. e is the embedding of the token before, h the row's hidden state.

    | kind    | latent                                                                            |
    |---------|-----------------------------------------------------------------------------------|
    | vanilla | e                                                                                 |
    | gated   | sigmoid([h; e] G + b) * e                                                         |
    | rnn     | tanh(o), with g, c, o = [s; e; h] J + b and s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c) |
    """

    rank: int  # width of its embedding and of the latent
    kind: MarkovKind = "vanilla"

    def check(self) -> None:
        """Refuses sizes that cannot be.

        Raises:
          ValueError: naming the field.
        """
        if self.kind not in MARKOV_KINDS:
            raise ValueError(f"head.kind: expected one of {', '.join(MARKOV_KINDS)}, got {self.kind!r}")
        if self.rank < 1:
            raise ValueError(f"head.rank: expected at least 1, got {self.rank}; None leaves the head out")

    @property
    def identity(self) -> str:
        """To name it in refusals."""
        return f"{self.kind} Markov head of rank {self.rank}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confidence:
    """A confidence head: one logit per row, of P(draft token accepted given that those before it were)."""

    reads_token: bool  # also the Markov head's embedding of the token before, else the hidden state alone


class MarkovHead(nnx.Module):
    """A `jspec.drafters.sequential.SequentialHead` of a `Markov`; its state is float32."""

    def __init__(self, config: DecoderConfig, sizes: Markov, columns: int, dtype: jnp.dtype):
        self.sizes = sizes
        rank, hidden = sizes.rank, config.hidden_size

        def zeros(shape: tuple[int, ...], *axes: str) -> nnx.Param[Any]:
            return nnx.Param(jnp.zeros(shape, dtype if len(shape) > 1 else jnp.float32), axes=axes)

        reduced = "vocabulary" if columns == config.vocab_size else "draft_vocabulary"
        self.embedding = zeros((config.vocab_size, rank), "vocabulary", "rank")
        self.output = zeros((rank, columns), "rank", reduced)
        width = {"vanilla": 0, "gated": 1, "rnn": 3}[sizes.kind] * rank
        inputs = hidden + (2 if sizes.kind == "rnn" else 1) * rank
        self.mix = zeros((inputs, width), "mixed", "rank") if width else None
        self.mix_bias = zeros((width,), "rank") if width else None

    def read(self, tokens: Int[Array, "*rows"], embed: Embed) -> Float[Array, "*rows rank"]:
        """Its own embedding of the tokens before."""
        return jnp.take(self.embedding[...], tokens, axis=0, mode="fill")

    def project(self, hidden: Float[Array, "*rows hidden"]) -> Float[Array, "*rows inner"]:
        """The hidden states' part of the mix, with its bias; nothing for "vanilla"."""
        if self.mix is None or self.mix_bias is None:
            return jnp.zeros((*hidden.shape[:-1], 0), jnp.float32)
        size = hidden.shape[-1]
        weight = self.mix[...][-size:] if self.sizes.kind == "rnn" else self.mix[...][:size]
        flat = project_float32(hidden.reshape(-1, size), weight, self.mix_bias[...])
        return flat.reshape(*hidden.shape[:-1], -1)

    def start(self, blocks: int) -> Float[Array, "blocks size"]:
        """Zeros."""
        return jnp.zeros((blocks, self.sizes.rank if self.sizes.kind == "rnn" else 0), jnp.float32)

    def step(
        self,
        state: Float[Array, "blocks size"],
        projected: Float[Array, "blocks inner"],
        read: Float[Array, "blocks rank"],
        row: Int[Array, ""],
    ) -> tuple[Float[Array, "blocks size"], Float[Array, "blocks rank"]]:
        """See `Markov`."""
        rank = self.sizes.rank
        if self.mix is None:
            return state, read.astype(jnp.float32)
        if self.sizes.kind == "gated":
            gate = projected + project_float32(read, self.mix[...][-rank:])
            return state, jax.nn.sigmoid(gate) * read.astype(jnp.float32)
        seen = jnp.concatenate([state.astype(read.dtype), read], axis=1)
        mixed = projected + project_float32(seen, self.mix[...][: 2 * rank])
        gate, candidate, out = jnp.split(mixed, 3, axis=1)
        kept = jax.nn.sigmoid(gate)
        return kept * state + (1 - kept) * jnp.tanh(candidate), jnp.tanh(out)


class ConfidenceHead(nnx.Module):
    """One linear unit over a row's hidden state, and the embedding of the token before it if it reads that."""

    def __init__(self, config: DecoderConfig, sizes: Confidence, markov: Markov | None, dtype: jnp.dtype):
        self.reads_token = sizes.reads_token
        rank = markov.rank if sizes.reads_token and markov is not None else 0
        shape = (config.hidden_size + rank, 1)
        self.weight: nnx.Param[Any] = nnx.Param(jnp.zeros(shape, dtype), axes=("mixed", "one"))
        self.bias: nnx.Param[Any] = nnx.Param(jnp.zeros((1,), jnp.float32), axes=("one",))

    def logits(
        self, hidden: Float[Array, "*rows hidden"], read: Float[Array, "*rows rank"] | None
    ) -> Float[Array, "*rows"]:
        """The confidence before the sigmoid, float32.

        Args:
          hidden: states of the rows.
          read: the Markov head's embedding of the tokens before; read by a head that reads it.
        """
        seen = hidden.astype(jnp.float32)
        if self.reads_token:
            assert read is not None
            seen = jnp.concatenate([seen, read.astype(jnp.float32)], axis=-1)
        weight = self.weight[...].astype(jnp.float32)[:, 0]
        return jnp.einsum("...i,i->...", seen, weight) + self.bias[...][0]
