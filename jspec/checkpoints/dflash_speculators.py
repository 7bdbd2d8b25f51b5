"""The config.json of the `speculators` library, to and from the layout of SpecForge and SGLang.

The tensors have the same names in both. Layer ids are one higher: there, 0 is the embedding. The library
trains window layers on a context that begins `window` tokens before the anchor, the same for the whole
block; here, as in SGLang, a window ends at each row, so such a drafter sees slightly less than it was trained on.

Source: vllm-project/speculators 0.9.0, models/dflash/config.py, models/dflash2/config.py, convert/dflash.
"""

from collections.abc import Mapping, Sequence
from typing import Any

VERSION = "0.9.0"  # of the library whose files these are
TYPES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel"}
_DFLASH2 = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_TRANSFORMS = ("output_multiplier", "final_logit_softcapping")
_KEPT = ("mask_token_id", "block_size", "num_target_layers", *_DFLASH2, *_TRANSFORMS)
# Also written beside the layers' settings by some versions.
_LAYER_KEYS = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
# Who made it and for whom, training settings, and sizes of a head that is not there.
_IGNORED = frozenset(
    {
        *("speculators_model_type", "speculators_version", "speculators_config", "architectures", "auto_map"),
        *("dtype", "torch_dtype", "tie_word_embeddings", "transformers_version", "max_anchors", "auf"),
        *("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim", "lambda_base_start"),
        *("lambda_base_decay_ratio", "initializer_range"),
    }
)
_READ = frozenset(
    {
        *("transformer_layer_config", "draft_vocab_size", "target_hidden_size", "aux_hidden_state_layer_ids"),
        *("sliding_window_non_causal", "sample_from_anchor", "projector_type", "shift_label"),
    }
)


def is_speculators(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this layout."""
    return "speculators_model_type" in values


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings as a config.json of SpecForge; what DFlash adds is checked by its reader.

    Raises:
      ValueError: on another kind of drafter, a reduced vocabulary, or a key that is missing or unknown.
    """
    kind = values["speculators_model_type"]
    if kind not in TYPES:
        raise ValueError(
            f"speculators_model_type: expected {' or '.join(TYPES)}, got {kind!r}; not supported yet"
        )
    unknown = sorted(set(values) - _READ - _IGNORED - set(_KEPT) - set(_LAYER_KEYS))
    if unknown:
        raise ValueError(
            f"{unknown[0]}: expected no such key in a speculators config, got {values[unknown[0]]!r}; "
            "it may change the maths: remove it only if you know that it does not"
        )
    layers = values.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ValueError(f"transformer_layer_config: expected the layers' settings, got {layers!r}")
    for key, expected in (
        ("draft_vocab_size", layers.get("vocab_size")),
        ("target_hidden_size", layers.get("hidden_size")),
        ("projector_type", "dflash"),
        ("shift_label", False),
    ):
        if values.get(key) not in (None, expected):
            raise ValueError(f"{key}: expected {expected!r} or none, got {values[key]!r}; not supported yet")
    kept = {key: values[key] for key in _KEPT if values.get(key) is not None}
    causal = not values.get("sliding_window_non_causal", kind == "dflash2")
    return _layers(values, layers) | {
        "architectures": [TYPES[kind]],
        "is_causal": None if causal else False,
        "sample_from_anchor": bool(values.get("sample_from_anchor")),
        "target_layer_ids": _shifted(values.get("aux_hidden_state_layer_ids")),
        **kept,
    }


def speculators_values(
    plain: Mapping[str, Any], target_name: str | None, target_architectures: Sequence[str]
) -> dict[str, Any]:
    """A config.json of this layout for one of SpecForge's, as `jspec.checkpoints.dflash_save` makes it.

    Args:
      plain: the settings.
      target_name: hub id or path of the target, from where the library takes embedding and head.
      target_architectures: of the target's config.json.

    Raises:
      ValueError: on block attention that the layout cannot say.
    """
    own = plain["dflash_config"]
    is_causal = plain.get("is_causal")
    if is_causal:
        raise ValueError(
            "config.is_causal: expected False or None, got True; the speculators layout has no such layers"
        )
    layer_keys = set(plain) - {"architectures", "dflash_config", "is_causal", "block_size", "dtype"}
    layers = {key: plain[key] for key in layer_keys - {"num_target_layers", "sample_from_anchor"}}
    kind = next(kind for kind, name in TYPES.items() if [name] == plain["architectures"])
    drafts = plain["block_size"] if plain.get("sample_from_anchor") else plain["block_size"] - 1
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": drafts,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    values = {
        "architectures": plain["architectures"],
        "aux_hidden_state_layer_ids": [i + 1 for i in own["target_layer_ids"]],
        "block_size": plain["block_size"],
        "draft_vocab_size": plain["vocab_size"],
        "dtype": plain["dtype"],
        "mask_token_id": own["mask_token_id"],
        "sample_from_anchor": bool(plain.get("sample_from_anchor")),
        "sliding_window_non_causal": is_causal is False,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target_name, "architectures": list(target_architectures)},
        },
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": dict(sorted(layers.items())),
    }
    if plain.get("num_target_layers") is not None:
        values["num_target_layers"] = plain["num_target_layers"]
    return values | {key: own[key] for key in (*_DFLASH2, *_TRANSFORMS) if key in own}


def _layers(values: Mapping[str, Any], layers: Mapping[str, Any]) -> dict[str, Any]:
    """The layers' settings, as a Qwen3 model's: that is what the library builds, whatever their type."""
    result = {key: value for key, value in layers.items() if key not in ("architectures", "auto_map")}
    if result.pop("model_type", "qwen3") not in ("qwen3", "llama") or result.pop("mlp_bias", None):
        raise ValueError(
            "transformer_layer_config: expected model_type qwen3 or llama, without mlp_bias, got "
            f"{layers.get('model_type')!r}, mlp_bias {layers.get('mlp_bias')!r}; not supported yet"
        )
    for key in _LAYER_KEYS:
        if key in values and result.setdefault(key, values[key]) != values[key]:
            raise ValueError(
                f"{key}: expected one value, got {result[key]!r} in transformer_layer_config and "
                f"{values[key]!r} beside it"
            )
    return result


def _shifted(layer_ids: Any) -> Any:
    """Ids of layer outputs; what is no list of ids stays for the reader to refuse."""
    if not isinstance(layer_ids, list) or not all(isinstance(i, int) for i in layer_ids):
        return layer_ids
    return [i - 1 for i in layer_ids]
