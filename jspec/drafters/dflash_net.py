"""The network of a DFlash drafter: Qwen3 layers over projected target features and a masked block.

DFlash 2 is the same network with a convolution around its sublayers and a candidate selector beside it,
DSpark and Domino are the same network with a head that corrects the logits by the tokens drafted before.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash2_layers import CandidateSelector, Convolution, ConvolvedLayer, Selector
from jspec.drafters.domino_head import Gru, GruHead
from jspec.drafters.dspark_heads import Confidence, ConfidenceHead, Markov, MarkovHead
from jspec.targets.config import DecoderConfig, LayerKind
from jspec.targets.layers import Layer, See, paged, project, rms_norm, rotations
from jspec.targets.rope import rotate
from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight, block_sight, causal_sight


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Everything that distinguishes one DFlash drafter from another, as one hashable value."""

    decoder: DecoderConfig  # sizes and kinds of the layers; max_context is the drafter's own limit
    block_size: int  # anchor and masks
    mask_token_id: int
    target_layer_ids: tuple[int, ...]  # captured states in order: 0-based layer outputs, -1 = the embedding
    num_target_layers: int | None  # of the target it was trained for, if the checkpoint says so
    target_hidden_size: int  # width of one captured state
    is_causal: bool | None = None  # inside the block; None = window layers are, full layers are not
    own_embedding: bool = False  # else it reads the target's
    draft_vocab_size: int | None = None  # drafts only that many ids of the target's; None = all
    anchor_predicts: bool = False  # row j drafts the token after position j, the anchor's included
    convolution: Convolution | None = None  # DFlash 2
    selector: Selector | None = None  # DFlash 2
    head: Markov | Gru | None = None  # DSpark, Domino
    confidence: Confidence | None = None  # DSpark
    output_multiplier: float = 1.0  # on the target head's logits of drafts
    final_softcap: float | None = None  # after the multiplier; the target's own has already been applied

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size: expected at least 2 (anchor and one mask), got {self.block_size}")
        if not 0 <= self.mask_token_id < self.decoder.vocab_size:
            raise ValueError(
                f"mask_token_id: expected 0 to {self.decoder.vocab_size - 1}, got {self.mask_token_id}"
            )
        if not self.target_layer_ids or min(self.target_layer_ids) < -1:
            raise ValueError(f"target_layer_ids: expected some ids from -1 on, got {self.target_layer_ids}")
        if not self.decoder.query_key_norm:
            raise ValueError(
                "query_key_norm: expected True, got False; DFlash layers norm their queries and keys"
            )
        if self.draft_vocab_size is not None and not 2 <= self.draft_vocab_size <= self.decoder.vocab_size:
            raise ValueError(
                f"draft_vocab_size: expected 2 to the vocabulary's {self.decoder.vocab_size}, or None, "
                f"got {self.draft_vocab_size}"
            )
        self._check_dflash2()
        self._check_heads()

    def _check_dflash2(self) -> None:
        hidden_size, vocab_size = self.decoder.hidden_size, self.decoder.vocab_size
        if self.convolution is not None:
            taps, group_size = self.convolution.taps, self.convolution.group_size
            if not 1 <= taps <= self.block_size:
                raise ValueError(f"convolution.taps: expected 1 to the block's {self.block_size}, got {taps}")
            if group_size < 1 or hidden_size % group_size:
                raise ValueError(
                    f"convolution.group_size: expected a divisor of the hidden size {hidden_size}, "
                    f"got {group_size}"
                )
        if self.selector is not None:
            if self.anchor_predicts:
                raise ValueError("anchor_predicts: expected False with a candidate selector, got True")
            if self.selector.rank < 1:
                raise ValueError(f"selector.rank: expected at least 1, got {self.selector.rank}")
            drafted = self.draft_vocab_size or vocab_size
            if not 1 <= self.selector.top_k <= drafted:
                raise ValueError(
                    f"selector.top_k: expected 1 to the {drafted} ids that are drafted, got {self.selector.top_k}"
                )
        if not (math.isfinite(self.output_multiplier) and self.output_multiplier > 0):
            raise ValueError(f"output_multiplier: expected a number above 0, got {self.output_multiplier}")
        if self.final_softcap is not None and not (
            math.isfinite(self.final_softcap) and self.final_softcap > 0
        ):
            raise ValueError(f"final_softcap: expected a number above 0 or None, got {self.final_softcap}")

    def _check_heads(self) -> None:
        if self.selector is not None and not (self.head is None and self.confidence is None):
            raise ValueError(
                "head, confidence: expected None with a candidate selector, which corrects logits itself, "
                f"got {self.head} and {self.confidence}"
            )
        if self.head is not None:
            self.head.check()
        if self.confidence is not None:
            if isinstance(self.head, Gru):
                raise ValueError("confidence: expected None with a GRU head, got a head; no method has both")
            if self.confidence.reads_token and self.head is None:
                raise ValueError(
                    "confidence.reads_token: expected False without a Markov head, got True; the embedding that "
                    "it would read is that head's"
                )

    @property
    def method(self) -> str:
        """What its authors call a drafter with these parts."""
        if isinstance(self.head, Gru):
            return "Domino"
        if self.head is not None or self.confidence is not None:
            return "DSpark"
        return "DFlash" if self.convolution is None and self.selector is None else "DFlash 2"

    @property
    def identity(self) -> str:
        """What it is and what it was trained for, to name it in refusals."""
        layers = "" if self.num_target_layers is None else f" of {self.num_target_layers} layers"
        head = "" if self.head is None else f" with a {self.head.identity}"
        return (
            f"{self.method}{head}, {self.decoder.num_layers} layers, hidden {self.decoder.hidden_size}, "
            f"vocabulary {self._vocabulary}, block {self.block_size}, for states "
            f"{list(self.target_layer_ids)} of width {self.target_hidden_size}{layers}"
        )

    @property
    def longest_draft(self) -> int:
        """Draft tokens that a block yields."""
        return self.block_size if self.anchor_predicts else self.block_size - 1

    @property
    def _vocabulary(self) -> str:
        whole = self.decoder.vocab_size
        return f"{whole}" if self.draft_vocab_size is None else f"{self.draft_vocab_size} of {whole}"

    def causal(self, kind: LayerKind) -> bool:
        """Whether a block token of such a layer sees only itself and those before it in the block."""
        return kind == "window" if self.is_causal is None else self.is_causal


class DFlashNet(nnx.Module):
    """The weights. It has no head, and an embedding only if the checkpoint brought one."""

    def __init__(self, config: DFlashConfig, dtype: jnp.dtype):
        self.config = config
        decoder = config.decoder
        width, hidden = len(config.target_layer_ids) * config.target_hidden_size, decoder.hidden_size

        def zeros(shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any = jnp.float32) -> nnx.Param[Any]:
            return nnx.Param(jnp.zeros(shape, dtype), axes=axes)

        self.fc = zeros((width, hidden), ("features", "hidden"), dtype)
        self.hidden_norm = zeros((hidden,), ("hidden",))
        self.layers = nnx.List([_layer(config, dtype) for _ in range(decoder.num_layers)])
        self.norm = zeros((hidden,), ("hidden",))
        self.embedding = (
            zeros((decoder.vocab_size, hidden), ("vocabulary", "hidden"), dtype)
            if config.own_embedding
            else None
        )
        self.draft_ids: nnx.Param[Any] | None = (
            None
            if config.draft_vocab_size is None
            else nnx.Param(jnp.zeros((config.draft_vocab_size,), jnp.int32), axes=("draft_vocabulary",))
        )
        self.candidate_selector = (
            None if config.selector is None else CandidateSelector(decoder, config.selector, dtype)
        )
        columns = config.draft_vocab_size or decoder.vocab_size
        self.head = _head(config, columns, dtype)
        markov = config.head if isinstance(config.head, Markov) else None
        self.confidence_head = (
            None if config.confidence is None else ConfidenceHead(decoder, config.confidence, markov, dtype)
        )

    def target_ids(self, columns: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Ids of columns of the draft logits; -1 stays -1."""
        if self.draft_ids is None:
            return columns
        return jnp.where(columns < 0, -1, self.draft_ids[...][jnp.maximum(columns, 0)])

    def project_context(self, features: Float[Array, "nodes features"]) -> Float[Array, "nodes hidden"]:
        """What every layer makes keys and values of: hidden_norm(fc(features))."""
        out = project(features.astype(self.fc[...].dtype), self.fc[...])
        return rms_norm(out, self.hidden_norm[...], self.config.decoder.norm_eps)

    def context_rows(
        self, features: Float[Array, "nodes features"], positions: Int[Array, "nodes"]
    ) -> tuple[
        Float[Array, "layers nodes kv_heads head_size"], Float[Array, "layers nodes kv_heads head_size"]
    ]:
        """Keys (normed and rotated) and values of confirmed tokens, for every layer.

        The context does not pass through the layers' input norms, so no layer waits for another.
        """
        decoder = self.config.decoder
        context = self.project_context(features)
        turns = rotations(decoder, positions)
        shape = (features.shape[0], decoder.stored_kv_heads, decoder.head_size)
        keys, values = [], []
        for kind, layer in zip(decoder.layer_kinds, self.layers, strict=True):
            attention = layer.attention
            key_bias = None if attention.key_bias is None else attention.key_bias[...]
            value_bias = None if attention.value_bias is None else attention.value_bias[...]
            k = project(context, attention.key[...], key_bias).reshape(shape)
            assert attention.key_norm is not None
            keys.append(rotate(rms_norm(k, attention.key_norm[...], decoder.norm_eps), *turns[kind]))
            values.append(project(context, attention.value[...], value_bias).reshape(shape))
        return jnp.stack(keys), jnp.stack(values)

    def block(
        self,
        embeddings: Float[Array, "nodes hidden"],
        positions: Int[Array, "nodes"],
        see: Callable[[int, LayerKind], See],
        kv_dtype: Any = None,
    ) -> Float[Array, "nodes hidden"]:
        """One pass over blocks, in front of the head. Decoding and training differ in `see` only.

        Args:
          embeddings: of [anchor, mask, mask, ...] of each block, one block after the other.
          positions: of these tokens in the text.
          see: attention of a layer (its index and kind) over context rows and the own block.
          kv_dtype: of the block's keys and values; None = as computed.
        """
        decoder = self.config.decoder
        turns = rotations(decoder, positions)
        x = embeddings.astype(self.fc[...].dtype)
        for index, (kind, layer) in enumerate(zip(decoder.layer_kinds, self.layers, strict=True)):
            x, _, _ = layer(x, turns[kind], see(index, kind), kv_dtype)
        return rms_norm(x, self.norm[...], decoder.norm_eps)


def _head(config: DFlashConfig, columns: int, dtype: jnp.dtype) -> MarkovHead | GruHead | None:
    match config.head:
        case None:
            return None
        case Gru() as sizes:
            return GruHead(config.decoder, sizes, columns, dtype)
        case Markov() as sizes:
            return MarkovHead(config.decoder, sizes, columns, dtype)


def _layer(config: DFlashConfig, dtype: jnp.dtype) -> Layer:
    if config.convolution is None:
        return Layer(config.decoder, dtype)
    return ConvolvedLayer(config.decoder, config.block_size, config.convolution, dtype)


def draft_logits(
    config: DFlashConfig, logits: Float[Array, "*rows vocabulary"]
) -> Float[Array, "*rows vocabulary"]:
    """The drafter's unary logits: the target head's, times the multiplier, then soft-capped.

    Source: SGLang 0.5.23, models/dflash.py. There, the candidates are chosen before; the transform is
    monotone, so this differs only where the cap makes two logits equal.
    """
    if config.output_multiplier != 1.0:
        logits = logits * config.output_multiplier
    cap = config.final_softcap
    return logits if cap is None else cap * jnp.tanh(logits / cap)


def paged_blocks(
    config: DFlashConfig,
    positions: Int[Array, "nodes"],
    pages: Pages,
    page_table: Int[Array, "lanes columns"],
    context_lengths: Int[Array, "lanes"],
) -> Callable[[int, LayerKind], See]:
    """What a block per lane sees while decoding: committed rows of `context_rows`, and itself."""
    sights: dict[LayerKind, Sight] = {
        kind: block_sights(config, kind, page_table, context_lengths, positions)
        for kind in dict.fromkeys(config.decoder.layer_kinds)
    }
    return lambda index, kind: paged(config.decoder, pages, index, sights[kind])


def block_sights(
    config: DFlashConfig,
    kind: LayerKind,
    page_table: Int[Array, "lanes columns"],
    context_lengths: Int[Array, "lanes"],
    positions: Int[Array, "nodes"],
) -> Sight:
    """Who sees what in one kind of layer: the context, and the own block.

    A window counts positions of the text, in the context as in the block: token i of the block sees
    j >= i - (window - 1) there, which only shows if the window is smaller than the block.

    Source: SGLang 0.5.23, models/dflash.py.
    """
    block_size = config.block_size
    window = config.decoder.window if kind == "window" else None
    offsets = jnp.arange(context_lengths.shape[0] + 1, dtype=jnp.int32) * block_size
    build = causal_sight if config.causal(kind) else block_sight
    sight = build(offsets, page_table, context_lengths, positions, max_queries=block_size, window=window)
    if config.causal(kind) or window is None or window >= block_size:
        return sight
    query, key = np.indices((block_size, sight.visible.shape[1] * 32))
    bits = (key >= query - (window - 1)).reshape(block_size, -1, 32)
    words = np.sum(bits.astype(np.uint32) << np.arange(32, dtype=np.uint32), axis=2, dtype=np.uint32)
    tiled = np.tile(words.view(np.int32), (context_lengths.shape[0], 1))
    return dataclasses.replace(sight, visible=jnp.asarray(tiled))
