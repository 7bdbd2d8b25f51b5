"""The config.json of EAGLE drafters in the `speculators` library's layout, to and from one of SGLang's layout.

Layer ids are one higher there: 0 is the embedding. `norm_output` has SGLang's meaning.

Source: vllm-project/speculators, models/eagle3/config.py, models/peagle/config.py, models/eagle.py (up to
0.1), and vllm, transformers_utils/configs/speculators/algos.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.checkpoints.dflash_speculators import VERSION

_TYPES = {
    "eagle": "LlamaForCausalLMEagle",
    "eagle3": "LlamaForCausalLMEagle3",
    "peagle": "PEagleDraftModel",
}
_NAMES = {"eagle3": "Eagle3DraftModel", "peagle": "PEagleDraftModel"}  # of the library's own classes
_KEPT = (
    *("draft_vocab_size", "target_hidden_size", "norm_before_fc", "fc_norm", "norm_output"),
    *("mask_token_id", "num_target_layers"),
)
_READ = frozenset(
    {
        *("transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "norm_before_residual"),
        *("layernorms", "fusion_bias", "transformer_layer_architecture"),
    }
)
# Who made it and for whom, and training settings.
_IGNORED = frozenset(
    {
        *("speculators_model_type", "speculators_version", "speculators_config", "architectures", "auto_map"),
        *("dtype", "torch_dtype", "tie_word_embeddings", "transformers_version", "embed_requires_grad"),
        *("enable_sp_ulysses", "num_depths", "down_sample_ratio", "down_sample_ratio_min"),
        *("initializer_range", "model_type", "return_dict", "output_attentions", "output_hidden_states"),
    }
)


def is_speculators(values: Mapping[str, Any]) -> bool:
    """Whether a config.json is of this layout and of an EAGLE drafter."""
    return values.get("speculators_model_type") in _TYPES


def plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings in SGLang's layout.

    Raises:
      ValueError: on a key that is missing, unknown, or asks for layers that are not supported.
    """
    kind = values["speculators_model_type"]
    unknown = sorted(set(values) - _READ - _IGNORED - set(_KEPT))
    if unknown:
        raise ValueError(
            f"{unknown[0]}: expected no such key in a speculators config, got {values[unknown[0]]!r}; "
            "it may change the maths: remove it only if you know that it does not"
        )
    layers = values.get("transformer_layer_config")
    if not isinstance(layers, Mapping):
        raise ValueError(f"transformer_layer_config: expected the layers' settings, got {layers!r}")
    plain = {key: value for key, value in layers.items() if key not in ("architectures", "auto_map")}
    plain["architectures"] = [_TYPES[kind]]
    if kind == "eagle":
        return plain | _eagle(values)
    if not isinstance(values.get("norm_before_residual"), bool):
        raise ValueError(
            f"norm_before_residual: expected true or false, got {values.get('norm_before_residual')!r}; the "
            "library and vLLM have different defaults: state it"
        )
    ids = values.get("eagle_aux_hidden_state_layer_ids")
    if ids is not None:
        if not isinstance(ids, list) or not all(isinstance(i, int) and i >= 0 for i in ids):
            raise ValueError(f"eagle_aux_hidden_state_layer_ids: expected a list of layers, got {ids!r}")
        plain["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [i - 1 for i in ids]}
    kept = {key: values[key] for key in _KEPT if values.get(key) is not None}
    return plain | kept | {"norm_before_residual": values["norm_before_residual"]}


def speculators_values(
    plain: Mapping[str, Any],
    *,
    draft_length: int,
    target_name: str | None,
    target_architectures: Sequence[str],
) -> dict[str, Any]:
    """A config.json of this layout for one of SGLang's, as `jspec.checkpoints.eagle_save` makes it.

    Args:
      plain: the settings of an EAGLE-3 or P-EAGLE drafter.
      draft_length: that the library proposes to draft.
      target_name: hub id or path of the target, from where the library takes what the files do not hold.
      target_architectures: of the target's config.json.
    """
    kind = next(kind for kind, name in _TYPES.items() if [name] == plain["architectures"])
    own = {*_KEPT, "norm_before_residual", "eagle_config", "architectures", "dtype", "bias"}
    width = plain["target_hidden_size"]
    method = {
        "proposal_type": "greedy",
        "speculative_tokens": draft_length,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    values = {
        "architectures": [_NAMES[kind]],
        "dtype": plain["dtype"],
        "eagle_aux_hidden_state_layer_ids": [
            i + 1 for i in plain["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        ],
        "norm_before_residual": plain.get("norm_before_residual", False),
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [method],
            "verifier": {"name_or_path": target_name, "architectures": list(target_architectures)},
        },
        "speculators_model_type": kind,
        "speculators_version": VERSION,
        "tie_word_embeddings": False,
        "transformer_layer_config": {key: value for key, value in sorted(plain.items()) if key not in own},
    }
    kept = {key: plain[key] for key in _KEPT if key in plain}
    return values | kept | {"target_hidden_size": None if width == plain["hidden_size"] else width}


def _eagle(values: Mapping[str, Any]) -> dict[str, Any]:
    for key, allowed in (
        ("layernorms", (None, False)),
        ("transformer_layer_architecture", (None, "auto", "LlamaDecoderLayer")),
        ("draft_vocab_size", (None,)),
    ):
        if values.get(key) not in allowed:
            raise ValueError(f"{key}: expected {allowed[-1]!r} or none, got {values[key]!r}; not supported")
    if not isinstance(values.get("fusion_bias", False), bool):
        raise ValueError(f"fusion_bias: expected true or false, got {values['fusion_bias']!r}")
    return {"bias": values.get("fusion_bias", False)}
