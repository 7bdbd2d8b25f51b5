"""The networks of EAGLE, EAGLE-3 and P-EAGLE drafters: a recurrence over target features and tokens.

One step turns (state, embedding of the next token) into the next state, which the head reads and
which the next step is fed. Training and decoding call the same step; what a row sees is an argument.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jspec.drafters.eagle_layers import BareLayer, WideLayer
from jspec.features import check_names
from jspec.net import Leaf, Params, net_of
from jspec.targets.config import DecoderConfig
from jspec.targets.layers import Layer, See, project, project_float32, rms_norm, rotations

Kind = Literal["eagle", "eagle3"]
Head = Callable[[Float[Array, "rows hidden"]], Float[Array, "rows vocabulary"]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleConfig:
    """Everything that distinguishes one EAGLE drafter from another, as one hashable value.

    `kind` says how a step begins. "eagle": fc(embedding ++ state) enters plain Llama layers, the first
    without an input norm, and no norm follows. "eagle3": fc fuses the captured states once, and a layer
    attends with norm(embedding) ++ norm(state).

    The key `norm_output` of public EAGLE-3 checkpoints means `head_reads_norm` to SpecForge (default
    true) and `feeds_back_norm` to SGLang (default false); here each has its own name.
    """

    kind: Kind
    decoder: DecoderConfig  # sizes of the layers; max_context is the drafter's own limit
    features: tuple[str, ...]  # captured states in order; see `jspec.features.check_names`
    target_hidden_size: int  # width of one captured state
    num_target_layers: int | None = None  # of the target it was trained for, if the checkpoint says so
    fc_bias: bool = False
    own_embedding: bool = False  # else it reads the target's
    own_head: bool = False  # else the target's
    draft_vocab_size: int | None = None  # drafts only that many ids of the target's; None = all
    feature_norms: bool = False  # EAGLE-3: RMSNorm of every captured state before fc ("fc_norm")
    norm_before_fc: bool = False  # EAGLE-3: one RMSNorm over all captured states before fc
    head_reads_norm: bool = True  # EAGLE-3: the head reads norm(state), else the state as it is
    feeds_back_norm: bool = False  # EAGLE-3: the next step is fed norm(state), else the state as it is
    norm_before_residual: bool = False  # EAGLE-3: a wide layer adds to norm(state), else to the state
    wide_layers: Literal["all", "first"] = "first"  # EAGLE-3: which layers read the embedding
    mask_token_id: int | None = None  # P-EAGLE: what stands for a token that is not known yet

    def __post_init__(self) -> None:
        decoder = self.decoder
        if self.kind not in ("eagle", "eagle3"):
            raise ValueError(f"kind: expected 'eagle' or 'eagle3', got {self.kind!r}")
        if not self.features:
            raise ValueError("features: expected at least one captured state, got none")
        check_names(self.features, self.num_target_layers or 1 << 30)
        for name, plain in (("sandwich_norms", False), ("attention_softcap", None)):
            if getattr(decoder, name) != plain:
                raise ValueError(
                    f"{name}: expected {plain} for the layers of an EAGLE drafter, got {getattr(decoder, name)}; "
                    "only a target's own layers have it: leave it out"
                )
        if self.target_hidden_size < 1:
            raise ValueError(f"target_hidden_size: expected at least 1, got {self.target_hidden_size}")
        self._check_vocabulary()
        if self.kind == "eagle":
            self._check_eagle()
        elif self.wide_layers not in ("all", "first"):
            raise ValueError(f"wide_layers: expected 'all' or 'first', got {self.wide_layers!r}")
        elif self.feature_norms and self.norm_before_fc:
            raise ValueError(
                "norm_before_fc: expected False with feature_norms, got True; choose one of them"
            )

    def _check_vocabulary(self) -> None:
        vocab_size, drafted, mask = self.decoder.vocab_size, self.draft_vocab_size, self.mask_token_id
        if drafted is not None and not 2 <= drafted <= vocab_size:
            raise ValueError(
                f"draft_vocab_size: expected 2 to the vocabulary's {vocab_size}, or None, got {drafted}"
            )
        if mask is not None and not 0 <= mask < vocab_size:
            raise ValueError(f"mask_token_id: expected 0 to {vocab_size - 1}, got {mask}")
        if self.target_hidden_size != self.decoder.hidden_size and not (self.own_embedding and self.own_head):
            raise ValueError(
                f"target_hidden_size: expected the drafter's hidden size {self.decoder.hidden_size}, got "
                f"{self.target_hidden_size}; a drafter of another width needs own_embedding and own_head"
            )

    def _check_eagle(self) -> None:
        if len(self.features) != 1 or self.target_hidden_size != self.decoder.hidden_size:
            raise ValueError(
                f"features: expected one state of width {self.decoder.hidden_size} for EAGLE, got "
                f"{list(self.features)} of width {self.target_hidden_size}"
            )
        only_eagle3: dict[str, Any] = {
            "feature_norms": False,
            "norm_before_fc": False,
            "head_reads_norm": False,
            "feeds_back_norm": False,
            "norm_before_residual": False,
            "mask_token_id": None,
        }
        for name, expected in only_eagle3.items():
            if getattr(self, name) != expected:
                raise ValueError(
                    f"{name}: expected {expected} for EAGLE, got {getattr(self, name)}; EAGLE-3 has it"
                )

    @property
    def identity(self) -> str:
        """What it is and what it was trained for, to name it in refusals."""
        layers = "" if self.num_target_layers is None else f" of {self.num_target_layers} layers"
        whole = self.decoder.vocab_size
        vocabulary = f"{whole}" if self.draft_vocab_size is None else f"{self.draft_vocab_size} of {whole}"
        return (
            f"{self.method}, {self.decoder.num_layers} layers, hidden {self.decoder.hidden_size}, "
            f"vocabulary {vocabulary}, for states {', '.join(self.features)} of width "
            f"{self.target_hidden_size}{layers}"
        )

    @property
    def method(self) -> str:
        """Name of the method, for people."""
        if self.kind == "eagle":
            return "EAGLE"
        return "EAGLE-3" if self.mask_token_id is None else "P-EAGLE"

    @property
    def features_size(self) -> int:
        """Width of all captured states side by side."""
        return len(self.features) * self.target_hidden_size


class EagleNet(nnx.Module):
    """The weights of any EAGLE drafter; embedding and head only if they are its own."""

    def __init__(self, config: EagleConfig, dtype: jnp.dtype):
        self.config = config
        decoder = config.decoder
        hidden, vocabulary = decoder.hidden_size, decoder.vocab_size
        drafted = config.draft_vocab_size or vocabulary

        def zeros(shape: tuple[int, ...], axes: tuple[str, ...], dtype: Any = jnp.float32) -> nnx.Param[Any]:
            return nnx.Param(jnp.zeros(shape, dtype), axes=axes)

        eagle3 = config.kind == "eagle3"
        self.fc = (
            zeros((config.features_size, hidden), ("features", "hidden"), dtype)
            if eagle3
            else zeros((2 * hidden, hidden), ("embedding_and_hidden", "hidden"), dtype)
        )
        self.fc_bias = zeros((hidden,), ("hidden",), dtype) if config.fc_bias else None
        self.feature_norms = (
            nnx.List([zeros((config.target_hidden_size,), ("features",)) for _ in config.features])
            if config.feature_norms
            else None
        )
        self.input_norm = zeros((config.features_size,), ("features",)) if config.norm_before_fc else None
        self.layers = nnx.List([_layer(config, i, dtype) for i in range(decoder.num_layers)])
        self.norm = zeros((hidden,), ("hidden",)) if eagle3 else None
        self.embedding = (
            zeros((vocabulary, hidden), ("vocabulary", "hidden"), dtype) if config.own_embedding else None
        )
        self.head = (
            zeros((hidden, drafted), ("hidden", "draft_vocabulary"), dtype) if config.own_head else None
        )
        self.draft_ids = (
            None
            if config.draft_vocab_size is None
            else nnx.Param(jnp.zeros((drafted,), jnp.int32), axes=("draft_vocabulary",))
        )
        self.mask_hidden = (
            None if config.mask_token_id is None else zeros((config.features_size,), ("features",), dtype)
        )

    def fuse(self, features: Float[Array, "rows features"]) -> Float[Array, "rows hidden"]:
        """States that the first step starts from: EAGLE's feature itself, EAGLE-3's fc over all of them."""
        x = features.astype(self.fc[...].dtype)
        if self.config.kind == "eagle":
            return x
        eps = self.config.decoder.norm_eps
        if self.feature_norms is not None:
            chunks = jnp.split(x, len(self.feature_norms), axis=1)
            x = jnp.concatenate(
                [rms_norm(c, w[...], eps) for c, w in zip(chunks, self.feature_norms, strict=True)], axis=1
            )
        if self.input_norm is not None:
            x = rms_norm(x, self.input_norm[...], eps)
        return project(x, self.fc[...], None if self.fc_bias is None else self.fc_bias[...])

    def step(
        self,
        embeddings: Float[Array, "rows hidden"],
        states: Float[Array, "rows hidden"],
        positions: Int[Array, "rows"],
        see: Callable[[int], See],
        kv_dtype: Any = None,
    ) -> tuple[
        Float[Array, "rows hidden"],
        Float[Array, "layers rows kv_heads head_size"],
        Float[Array, "layers rows kv_heads head_size"],
    ]:
        """One step of the recurrence for every row.

        Row i holds the state of token t (a fused feature, or what the step before fed back) and the
        embedding of token t + 1; its position is t.

        Args:
          embeddings: of the next token, from the drafter's own table or the target's.
          states: from `fuse` or `fed_back`.
          positions: for the rotary embedding.
          see: attention of a layer, by its index; it is handed the rows' queries, keys and values.
          kv_dtype: of keys and values; None = as computed.

        Returns:
          States, for `head_input` and `fed_back`, and the rows' keys and values per layer.
        """
        decoder = self.config.decoder
        turns = rotations(decoder, positions)
        dtype = self.fc[...].dtype
        embeddings, x = embeddings.astype(dtype), states.astype(dtype)
        if self.config.kind == "eagle":
            both = jnp.concatenate([embeddings, x], axis=1)
            x = project(both, self.fc[...], None if self.fc_bias is None else self.fc_bias[...])
        keys, values = [], []
        for index, (kind, layer) in enumerate(zip(decoder.layer_kinds, self.layers, strict=True)):
            if isinstance(layer, WideLayer):
                x, k, v = layer(embeddings, x, turns[kind], see(index), kv_dtype)
            else:
                x, k, v = layer(x, turns[kind], see(index), kv_dtype)
            keys.append(k)
            values.append(v)
        return x, jnp.stack(keys), jnp.stack(values)

    def head_input(self, states: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        """What the head reads of a step's states."""
        return self._normed(states) if self.config.head_reads_norm else states

    def fed_back(self, states: Float[Array, "rows hidden"]) -> Float[Array, "rows hidden"]:
        """What the next step is given of a step's states."""
        return self._normed(states) if self.config.feeds_back_norm else states

    def logits(
        self, states: Float[Array, "rows hidden"], target_head: Head
    ) -> Float[Array, "rows draft_vocabulary"]:
        """Float32 scores of a step's states, over the drafted ids (see `target_ids`).

        Args:
          states: as `step` returns them.
          target_head: of post-norm hidden states, with the drafted columns only; for drafters without a
            head of their own.
        """
        hidden = self.head_input(states)
        return target_head(hidden) if self.head is None else project_float32(hidden, self.head[...])

    def target_ids(self, columns: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
        """Ids of columns of the draft logits; -1 stays -1."""
        if self.draft_ids is None:
            return columns
        return jnp.where(columns < 0, -1, self.draft_ids[...][jnp.maximum(columns, 0)])

    def embed(
        self, ids: Int[Array, "rows"], target_embed: Callable[[Array], Array]
    ) -> Float[Array, "rows hidden"]:
        """Embeddings of token ids, from the drafter's own table or the target's. Unknown ids give NaN."""
        if self.embedding is None:
            return target_embed(ids)
        return jnp.take(self.embedding[...], ids, axis=0, mode="fill")

    def _normed(self, states: Array) -> Array:
        assert self.norm is not None
        return rms_norm(states, self.norm[...], self.config.decoder.norm_eps)


def eagle_leaves(config: EagleConfig, dtype: jnp.dtype) -> tuple[Leaf, ...]:
    """The arrays that an EAGLE drafter's params hold, in their order; norms stay float32."""
    return net_of(EagleNet, config, dtype).leaves


def eagle_net(config: EagleConfig, params: Params) -> EagleNet:
    """The module around a drafter's params.

    Raises:
      ValueError: if they are not as many as the config needs.
    """
    return net_of(EagleNet, config, jnp.dtype(jnp.float32)).module(params)


def _layer(config: EagleConfig, index: int, dtype: jnp.dtype) -> BareLayer | WideLayer | Layer:
    if config.kind == "eagle3" and (index == 0 or config.wide_layers == "all"):
        return WideLayer(config.decoder, dtype, norm_before_residual=config.norm_before_residual)
    if config.kind == "eagle" and index == 0:
        return BareLayer(config.decoder, dtype)
    return Layer(config.decoder, dtype)
