"""Decoder-only targets: Llama, Qwen2, Qwen3 and Gemma 3 text models as one set of pure functions."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jspec.cache import Cache, GroupLayout, Pending
from jspec.features import check_names
from jspec.net import Leaf, Params, net_of
from jspec.round import Nodes
from jspec.sharding import MESH_AXES
from jspec.targets.config import DecoderConfig, LayerKind
from jspec.targets.layers import Decoder, paged, rotations
from jspec.targets.target import Hidden
from pallas_kernels.attention.sight import Sight, causal_sight, tree_sight


def decoder_leaves(config: DecoderConfig, dtype: jnp.dtype) -> tuple[Leaf, ...]:
    """The arrays that a `DecoderTarget`'s params hold, in their order; norms stay float32."""
    return net_of(Decoder, config, dtype).leaves


def decoder_units(config: DecoderConfig) -> dict[str, int]:
    """How many indivisible pieces each logical axis has that a mesh may split: heads, not features of heads."""
    return {
        "vocabulary": config.vocab_size,
        "heads": config.num_heads,
        "kv_heads": config.stored_kv_heads,
        "mlp": config.intermediate_size,
    }


def with_kv_copies(config: DecoderConfig, mesh: Mesh | None) -> DecoderConfig:
    """The same model with its KV heads copied, if a mesh splits heads over a multiple of as many devices."""
    parts = 1 if mesh is None else mesh.shape.get(MESH_AXES["kv_heads"], 1)
    if config.replicated or parts % config.num_kv_heads or config.num_heads % parts:
        return config
    return dataclasses.replace(config, kv_copies=max(parts // config.num_kv_heads, 1))


@dataclasses.dataclass(frozen=True)
class DecoderTarget:
    """The `Target` of one `DecoderConfig`. `params` is a flat tuple of arrays (see `decoder_leaves`)."""

    config: DecoderConfig

    @property
    def identity(self) -> str:
        """See `DecoderConfig.identity`."""
        return self.config.identity

    @property
    def vocab_size(self) -> int:
        """Ids that the head scores."""
        return self.config.vocab_size

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        return self.config.hidden_size

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return self.config.num_layers

    @property
    def max_context(self) -> int:
        """Tokens that one text may have."""
        return self.config.max_context

    @property
    def groups(self) -> tuple[GroupLayout, ...]:
        """Group 0: the layers that see everything (there may be none); group 1: those with a window."""
        kinds: list[LayerKind] = ["full"]
        if "window" in self.config.layer_kinds:
            kinds.append("window")
        return tuple(
            GroupLayout(
                num_layers=self.config.layer_kinds.count(kind),
                num_kv_heads=self.config.stored_kv_heads,
                head_size=self.config.head_size,
                window=self.config.window if kind == "window" else None,
            )
            for kind in kinds
        )

    def forward(
        self,
        params: Params,
        nodes: Nodes,
        cache: Cache,
        lanes: Int[Array, "lanes"],
        capture: tuple[str, ...],
        max_queries: int,
    ) -> Hidden:
        """See `jspec.targets.target.Target.forward`.

        Raises:
          ValueError: if `capture` names a state that this model does not have.
        """
        check_names(capture, self.num_layers)
        model = self._module(params)
        config = self.config
        rows = jnp.maximum(lanes, 0)
        context_lengths = jnp.where(lanes >= 0, cache.lengths[rows], 0)

        def sight(page_table: Array, window: int | None) -> Sight:
            shared = (nodes.offsets, page_table, context_lengths, nodes.positions)
            if nodes.parents is None:
                return causal_sight(*shared, max_queries=max_queries, window=window)
            return tree_sight(*shared, nodes.parents, max_queries=max_queries, window=window)

        sights = [
            sight(group.page_table[rows], layout.window)
            for group, layout in zip(cache.groups, self.groups, strict=True)
        ]
        turns = rotations(config, nodes.positions)
        keys: list[list[Array]] = [[] for _ in sights]
        values: list[list[Array]] = [[] for _ in sights]

        x = model.embed(nodes.tokens)
        seen = {"embedding": x} if "embedding" in capture else {}
        for index, (kind, layer) in enumerate(zip(config.layer_kinds, model.layers, strict=True)):
            g = 0 if kind == "full" else 1
            pages = cache.groups[g].pages
            x, k, v = layer(x, turns[kind], paged(config, pages, len(keys[g]), sights[g]), pages.dtype)
            keys[g].append(k)
            values[g].append(v)
            if f"layer.{index}" in capture:
                seen[f"layer.{index}"] = x
        x = model.final_norm(x)
        seen["final_norm"] = x
        features = [seen[name] for name in capture] or [jnp.zeros((x.shape[0], 0), x.dtype)]
        return Hidden(
            hidden=x,
            features=jnp.concatenate(features, axis=1),
            pending=tuple(
                self._pending(k, v, group.pages.dtype, x.shape[0])
                for k, v, group in zip(keys, values, cache.groups, strict=True)
            ),
        )

    def _pending(self, keys: list[Array], values: list[Array], dtype: Any, nodes: int) -> Pending:
        if not keys:
            none = jnp.zeros((0, nodes, self.config.stored_kv_heads, self.config.head_size), dtype)
            return Pending(k=none, v=none)
        return Pending(k=jnp.stack(keys), v=jnp.stack(values))

    def embed(self, params: Params, ids: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """What layer 0 reads for `ids`: the embedding, scaled. Ids outside the vocabulary give NaN."""
        return self._module(params).embed(ids)

    def logits(self, params: Params, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]:
        """Float32 scores of post-norm hidden states, with the final soft cap applied."""
        return self._module(params).logits(hidden)

    def _module(self, params: Params) -> Decoder:
        return net_of(Decoder, self.config, jnp.dtype(jnp.float32)).module(params)
