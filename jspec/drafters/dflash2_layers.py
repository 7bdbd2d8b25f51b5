"""What DFlash 2 adds to DFlash's network: a convolution around every sublayer, and the selector's tables.

Source: SGLang 0.5.23, models/dflash.py (DFlashGroupedConv, CandidateSelector).
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash2_lattice import candidate_scores
from jspec.targets.config import DecoderConfig
from jspec.targets.layers import Layer, Rotation, See, project_float32, rms_norm


@dataclasses.dataclass(frozen=True, kw_only=True)
class Convolution:
    """Sizes of the convolution over the rows of a block."""

    taps: int  # a row is mixed with the taps - 1 rows before it
    group_size: int  # neighbouring features that share one dynamic coefficient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Selector:
    """Sizes of the candidate selector."""

    rank: int  # width of the two codebooks
    top_k: int  # candidates per row


class GroupedConvolution(nnx.Module):
    """A causal convolution over each block's rows, whose kernel is computed from the rows themselves.

    It has two sides: 0 convolves what a sublayer reads, 1 what it returns, both with kernels made of
    what it reads. `base_kernel` holds coefficients per feature, `kernel_projection` gives each row's
    additions per group, in the order [side, tap, group].
    """

    def __init__(self, hidden_size: int, block_size: int, sizes: Convolution, dtype: jnp.dtype):
        self.block_size = block_size
        self.shape = (2, sizes.taps, hidden_size // sizes.group_size)
        kernels = 2 * sizes.taps * (hidden_size // sizes.group_size)
        self.base_kernel: nnx.Param[Any] = nnx.Param(
            jnp.zeros((2, sizes.taps, hidden_size), jnp.float32), axes=("sides", "taps", "hidden")
        )
        self.kernel_projection: nnx.Param[Any] = nnx.Param(
            jnp.zeros((hidden_size, kernels), dtype), axes=("hidden", "kernels")
        )

    def prepare(
        self, x: Float[Array, "nodes hidden"]
    ) -> tuple[Float[Array, "nodes hidden"], Float[Array, "nodes taps groups"]]:
        """What the sublayer reads in place of x, and the additions to the kernel for `finish`."""
        added = project_float32(x, self.kernel_projection[...]).reshape(-1, *self.shape)
        return convolve(x, self.base_kernel[...][0], added[:, 0], self.block_size), added[:, 1]

    def finish(
        self, x: Float[Array, "nodes hidden"], added: Float[Array, "nodes taps groups"]
    ) -> Float[Array, "nodes hidden"]:
        """What goes into the residual stream in place of the sublayer's output x."""
        return convolve(x, self.base_kernel[...][1], added, self.block_size)


def convolve(
    x: Float[Array, "nodes hidden"],
    base: Float[Array, "taps hidden"],
    added: Float[Array, "nodes taps groups"],
    block_size: int,
) -> Float[Array, "nodes hidden"]:
    """y_j = sum over taps t of (base_t + added_{j,t}) * x_{j-t}, with x = 0 before the block's first row.

    Computed in float32, returned in x's dtype; with base_0 = 1 and all else 0 it returns x bit for bit.

    Args:
      x: rows of whole blocks, one block after the other.
      base: coefficients per feature.
      added: to the coefficients of each row, one value for each group of neighbouring features.
      block_size: rows per block.
    """
    (nodes, hidden), (taps, groups) = x.shape, added.shape[1:]
    grouped = (nodes // block_size, block_size, groups, hidden // groups)
    rows = x.astype(jnp.float32).reshape(grouped)
    coefficients = base.astype(jnp.float32).reshape(1, 1, taps, *grouped[2:]) + added.reshape(
        *grouped[:2], taps, groups, 1
    )
    out = coefficients[:, :, 0] * rows
    for tap in range(1, taps):
        earlier = jnp.pad(rows[:, : block_size - tap], ((0, 0), (tap, 0), (0, 0), (0, 0)))
        out = out + coefficients[:, :, tap] * earlier
    return out.reshape(nodes, hidden).astype(x.dtype)


class ConvolvedLayer(Layer):
    """A decoder layer over blocks, with a convolution before and after attention and MLP."""

    def __init__(self, config: DecoderConfig, block_size: int, sizes: Convolution, dtype: jnp.dtype):
        super().__init__(config, dtype)
        self.attention_conv = GroupedConvolution(config.hidden_size, block_size, sizes, dtype)
        self.mlp_conv = GroupedConvolution(config.hidden_size, block_size, sizes, dtype)

    def __call__(
        self, x: Array, rotation: Rotation, see: See, kv_dtype: Any = None
    ) -> tuple[Array, Array, Array]:
        """See `Layer`; x are rows of whole blocks."""
        read, added = self.attention_conv.prepare(rms_norm(x, self.attention_norm[...], self.eps))
        out, k, v = self.attention(read, rotation, see, kv_dtype)
        x = x + self.attention_conv.finish(out, added)
        read, added = self.mlp_conv.prepare(rms_norm(x, self.mlp_norm[...], self.eps))
        return x + self.mlp_conv.finish(self.mlp(read), added), k, v


class CandidateSelector(nnx.Module):
    """Two codebooks and a projection: which candidate follows which predecessor."""

    def __init__(self, config: DecoderConfig, sizes: Selector, dtype: jnp.dtype):
        codebook, axes = (config.vocab_size, sizes.rank), ("vocabulary", "rank")
        self.predecessor_codebook: nnx.Param[Any] = nnx.Param(jnp.zeros(codebook, dtype), axes=axes)
        self.successor_codebook: nnx.Param[Any] = nnx.Param(jnp.zeros(codebook, dtype), axes=axes)
        self.hidden_projection: nnx.Param[Any] = nnx.Param(
            jnp.zeros((config.hidden_size, sizes.rank), dtype), axes=("hidden", "rank")
        )

    def project(self, hidden: Float[Array, "*rows hidden"]) -> Float[Array, "*rows rank"]:
        """The hidden states' side of the scores, float32."""
        flat = project_float32(hidden.reshape(-1, hidden.shape[-1]), self.hidden_projection[...])
        return flat.reshape(*hidden.shape[:-1], -1)

    def scores(
        self,
        projected: Float[Array, "*rows rank"],
        predecessors: Int[Array, "*rows"],
        ids: Int[Array, "*rows candidates"],
        unary: Float[Array, "*rows candidates"],
    ) -> Float[Array, "*rows candidates"]:
        """Score of every candidate, given the token before it, float32.

        Args:
          projected: from `project`, of the row that predicts the candidates.
          predecessors: ids of the tokens before, 0 .. vocabulary - 1.
          ids: the candidates.
          unary: their transformed logits (`jspec.drafters.dflash_net.draft_logits`).
        """
        before = jnp.take(self.predecessor_codebook[...], predecessors, axis=0, mode="fill")
        after = jnp.take(self.successor_codebook[...], ids, axis=0, mode="fill")
        return candidate_scores(projected, before, after, unary)
