"""An EAGLE drafter that is to be trained: its sizes for a target, and fresh weights."""

import zlib
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.drafters.eagle_net import EagleConfig, Kind, eagle_leaves
from jspec.features import check_names, layer_outputs
from jspec.net import Leaf, Params
from jspec.targets.config import DecoderConfig, LayerKind

INITIALIZER_RANGE = 0.02


def default_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The layers whose outputs EAGLE-3 captures where nobody says which: an early, the middle, a late one.

    Raises:
      ValueError: the target is too small to have three of them.

    Source: SpecForge and SGLang: [1, L // 2 - 1, L - 4], 0-based outputs.
    """
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    if not 0 <= ids[0] < ids[1] < ids[2]:
        raise ValueError(
            f"target_layer_ids: expected three layers, as a target of {num_layers} layers has no defaults "
            f"({list(ids)}); name them"
        )
    return ids


def eagle_config_for(
    target: DecoderConfig,
    *,
    kind: Kind,
    target_layer_ids: Sequence[int] | None = None,
    num_layers: int = 1,
    draft_vocab_size: int | None = None,
    own_head: bool = False,
    own_embedding: bool = False,
    fc_bias: bool = False,
    feature_norms: bool = False,
    norm_before_fc: bool = False,
    head_reads_norm: bool | None = None,
    feeds_back_norm: bool = False,
    norm_before_residual: bool = False,
    wide_layers: Literal["all", "first"] = "first",
    mask_token_id: int | None = None,
    query_key_norm: bool = False,
    hidden_size: int | None = None,
    intermediate_size: int | None = None,
    num_heads: int | None = None,
    num_kv_heads: int | None = None,
    head_size: int | None = None,
    window: int | None = None,
    layer_kinds: Sequence[LayerKind] | None = None,
) -> EagleConfig:
    """The config of a drafter for a target, whose sizes it takes where none are given.

    Args:
      target: reads the drafts.
      kind: "eagle", which reads what the head reads, or "eagle3", which reads captured layers.
      target_layer_ids: of EAGLE-3, 0-based layer outputs (-1 = the embedding); None = `default_layer_ids`.
      num_layers: of the drafter.
      draft_vocab_size: drafts only so many ids; None = all.
      own_head: trains a head of its own; else the target's, which needs the target's hidden size.
      own_embedding: the same for the embedding.
      fc_bias: see `EagleConfig`, as for the next seven.
      feature_norms: RMSNorm of every captured state.
      norm_before_fc: one RMSNorm over all captured states.
      head_reads_norm: None = as the kind does.
      feeds_back_norm: recurrence on the normed state.
      norm_before_residual: a wide layer adds to the normed state.
      wide_layers: which layers read the embedding.
      mask_token_id: makes it a P-EAGLE drafter.
      query_key_norm: RMSNorm of every head of queries and keys.
      hidden_size: of the drafter; None = the target's, as for the next four.
      intermediate_size: of the layers.
      num_heads: of the queries.
      num_kv_heads: of keys and values.
      head_size: of all heads.
      window: of its window layers, which turn as the target's window layers do, if it has any.
      layer_kinds: "full" or "window" per layer; None = all alike, with a window if there is one.

    Raises:
      ValueError: layers that the target does not have, or choices that do not go together.
    """
    if kind == "eagle":
        if target_layer_ids is not None:
            raise ValueError(
                f"target_layer_ids: expected None for EAGLE, which reads the final norm, got "
                f"{list(target_layer_ids)}"
            )
        features: tuple[str, ...] = ("final_norm",)
    else:
        ids = default_layer_ids(target.num_layers) if target_layer_ids is None else tuple(target_layer_ids)
        if len(set(ids)) != len(ids):
            raise ValueError(f"target_layer_ids: expected different layers, got {list(ids)}; drop one")
        features = layer_outputs(ids)
    check_names(features, target.num_layers)
    head_size = head_size or target.head_size
    kinds = tuple(layer_kinds or (("full" if window is None else "window"),) * num_layers)
    windows = "window" in kinds
    decoder = DecoderConfig(
        architecture="qwen3" if query_key_norm else "llama",
        vocab_size=target.vocab_size,
        hidden_size=hidden_size or target.hidden_size,
        intermediate_size=intermediate_size or target.intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads or target.num_heads,
        num_kv_heads=num_kv_heads or target.num_kv_heads,
        head_size=head_size,
        norm_eps=target.norm_eps,
        max_context=target.max_context,
        full_rope=target.full_rope,
        window_rope=(target.window_rope or target.full_rope) if windows else None,
        layer_kinds=kinds,
        window=window if windows else None,
        query_key_norm=query_key_norm,
        query_scale=head_size**-0.5,
    )
    return EagleConfig(
        kind=kind,
        decoder=decoder,
        features=features,
        target_hidden_size=target.hidden_size,
        num_target_layers=target.num_layers,
        fc_bias=fc_bias,
        own_embedding=own_embedding,
        own_head=own_head,
        draft_vocab_size=draft_vocab_size,
        feature_norms=feature_norms,
        norm_before_fc=norm_before_fc,
        head_reads_norm=kind == "eagle3" if head_reads_norm is None else head_reads_norm,
        feeds_back_norm=feeds_back_norm,
        norm_before_residual=norm_before_residual,
        wide_layers=wide_layers,
        mask_token_id=mask_token_id,
    )


def init_eagle_params(
    config: EagleConfig,
    key: Array,
    dtype: DTypeLike,
    *,
    embedding: Float[Array, "vocabulary hidden"] | None = None,
    head: Float[Array, "hidden draft_vocabulary"] | None = None,
    draft_ids: Int[Array, "draft_vocabulary"] | None = None,
    initializer_range: float = INITIALIZER_RANGE,
) -> Params:
    """Weights to start a training from: matrices normal, norms one, biases zero, mask_hidden standard normal.

    Args:
      config: of the drafter.
      key: consumed. A leaf's values depend on the key and the leaf's name alone.
      dtype: of the matrices; norms stay float32.
      embedding: copied, for a config with an embedding of its own; None = normal.
      head: copied, for a config with a head of its own; None = normal.
      draft_ids: ascending target ids; for a config with a reduced vocabulary.
      initializer_range: standard deviation of the normal leaves.

    Raises:
      ValueError: an array that the config has no place for, or of another shape, or no draft_ids.

    Source: SpecForge, modeling/draft/llama3_eagle.py; random numbers are drawn in another order.
    """
    leaves = eagle_leaves(config, jnp.dtype(dtype))
    shapes = {leaf.path: leaf.shape for leaf in leaves}
    given = {"embedding": embedding, "head": head, "draft_ids": draft_ids}
    for name, array in given.items():
        wanted = shapes.get(name)
        if (array is not None or (name == "draft_ids" and wanted is not None)) and (
            array is None or array.shape != wanted
        ):
            raise ValueError(
                f"{name}: expected {'None' if wanted is None else f'shape {list(wanted)}'}, got "
                f"{'None' if array is None else f'shape {list(array.shape)}'}; "
                f"the drafter is ({config.identity})"
            )
    return tuple(
        jnp.array(given[leaf.path], leaf.dtype)
        if given.get(leaf.path) is not None
        else _initial(leaf, jax.random.fold_in(key, zlib.crc32(leaf.path.encode())), initializer_range)
        for leaf in leaves
    )


def _initial(leaf: Leaf, key: Array, deviation: float) -> Array:
    name = leaf.path.rpartition(".")[2]
    if name.endswith("norm") or leaf.path.startswith("feature_norms."):
        return jnp.ones(leaf.shape, leaf.dtype)
    if name.endswith("bias"):
        return jnp.zeros(leaf.shape, leaf.dtype)
    if name == "mask_hidden":
        deviation = 1.0
    return (deviation * jax.random.normal(key, leaf.shape, jnp.float32)).astype(leaf.dtype)
