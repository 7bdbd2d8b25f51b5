"""The config.json of an EAGLE drafter, of any public layout, to settings that have one meaning each.

The layers' part of the config is read as a Llama's or Qwen3's, with the same strictness. What only the
tensors can tell (own embedding, own head, number of captured states) is added by the loader.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from jspec.checkpoints.eagle_speculators import is_speculators, plain_values
from jspec.checkpoints.hf_config import config_from_hf
from jspec.drafters.eagle_net import Kind
from jspec.targets.config import DecoderConfig

EAGLE = "LlamaForCausalLMEagle"
EAGLE3 = "LlamaForCausalLMEagle3"
DEEPSPEC = "Qwen3Eagle3Model"
PEAGLE = "PEagleDraftModel"
# Published under other names: SafeAILab's EAGLE calls itself a Llama.
ALIASES = {
    "LlamaForCausalLM": EAGLE,
    "Qwen2ForCausalLMEagle": EAGLE,
    "Eagle3LlamaForCausalLM": EAGLE3,
    "Eagle3Qwen3ForCausalLM": EAGLE3,
    "PeagleLlamaForCausalLM": PEAGLE,
}
ARCHITECTURES = (EAGLE, EAGLE3, DEEPSPEC, PEAGLE)

Meaning = Literal["specforge", "sglang"]  # of the key norm_output

_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MODEL_TYPES = ("llama", "qwen2", "qwen3")  # the first where a config does not say
_MASK_KEYS = ("mask_token_id", "ptd_token_id", "pard_token")
_EAGLE_KEYS = frozenset({"bias", "qkv_bias", "num_target_layers"})
_EAGLE3_KEYS = frozenset(
    {
        *("bias", "draft_vocab_size", "target_hidden_size", "num_target_layers", "num_aux_hidden_states"),
        *("fc_norm", "use_aux_norm", "norm_before_fc", "norm_output", "norm_before_residual"),
        *("eagle_config", "target_layer_ids", "draft_num_hidden_layers", *_MASK_KEYS),
    }
)
# Keys with the only values that leave the maths as it is implemented here.
_FIXED: dict[str, tuple[Any, ...]] = {
    "use_aux_hidden_state": (None, True),
    "parallel_drafting": (None, False, True),  # says what mask_hidden says, too
}
# Training settings, names, code to run.
_IGNORED = frozenset(
    {"auto_map", "ttt_length", "step_loss_decay", "target_model_name_or_path", "target_model_type"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleSettings:
    """What a config.json says. None = it does not say; the loader then looks at the tensors or the target."""

    kind: Kind
    decoder: DecoderConfig
    parallel: bool  # P-EAGLE
    tied: bool  # the head is the embedding
    wide_layers: Literal["all", "first"]
    layer_ids: tuple[int, ...] | None  # 0-based layer outputs, -1 = the embedding
    num_states: int | None  # captured states
    target_hidden_size: int
    num_target_layers: int | None
    draft_vocab_size: int | None
    fc_bias: bool | None
    feature_norms: bool
    norm_before_fc: bool
    norm_output: bool | None
    norm_before_residual: bool
    mask_token_id: int | None


def architecture_of(values: Mapping[str, Any]) -> str | None:
    """Which of `ARCHITECTURES` a config.json is of; None if of none."""
    if is_speculators(values):
        values = {"architectures": plain_values(values)["architectures"]}
    given = values.get("architectures")
    if not isinstance(given, list) or len(given) != 1:
        return None
    name = ALIASES.get(given[0], given[0])
    return name if name in ARCHITECTURES else None


def read_eagle_config(values: Mapping[str, Any]) -> EagleSettings:
    """The settings of a parsed config.json of SafeAILab, SpecForge, SGLang, DeepSpec or `speculators`.

    Raises:
      ValueError: on another architecture, or a key that is missing, unknown or contradictory.

    Source: SafeAILab EAGLE, model/cnets.py and cnets1.py; SpecForge, modeling/draft/llama3_eagle.py and
    peagle.py; SGLang 0.5.23, models/llama_eagle.py and llama_eagle3.py; DeepSpec, modeling/eagle3.
    """
    if is_speculators(values):
        values = plain_values(values)
    architecture = architecture_of(values)
    if architecture is None:
        raise ValueError(
            f"architectures: expected one of {', '.join((*ARCHITECTURES, *ALIASES))}, got "
            f"{values.get('architectures')}; this is no EAGLE drafter"
        )
    if architecture == EAGLE:
        return _eagle(values)
    return _eagle3(architecture, values)


def _eagle(values: Mapping[str, Any]) -> EagleSettings:
    decoder = _decoder(values, _EAGLE_KEYS)
    if values.get("qkv_bias"):
        decoder = dataclasses.replace(decoder, qkv_bias=True)
    return EagleSettings(
        kind="eagle",
        decoder=decoder,
        parallel=False,
        tied=False,
        wide_layers="first",
        layer_ids=None,
        num_states=1,
        target_hidden_size=decoder.hidden_size,
        num_target_layers=_size("num_target_layers", values.get("num_target_layers")),
        draft_vocab_size=None,
        fc_bias=_flag("bias", values.get("bias"), None),
        feature_norms=False,
        norm_before_fc=False,
        norm_output=None,
        norm_before_residual=False,
        mask_token_id=None,
    )


def _eagle3(architecture: str, values: Mapping[str, Any]) -> EagleSettings:
    nested = values.get("eagle_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"eagle_config: expected a JSON object, got {nested!r}")
    unknown = sorted(set(nested) - _EAGLE3_KEYS - set(_FIXED) - _IGNORED - {_LAYER_IDS})
    if unknown:
        raise ValueError(
            f"eagle_config: expected no key {unknown[0]!r}, got {nested[unknown[0]]!r}; "
            "it may change the maths: remove it only if you know that it does not"
        )
    if _LAYER_IDS in values:
        raise ValueError(
            f"{_LAYER_IDS}: expected it inside eagle_config (0-based layer outputs), got "
            f"{values[_LAYER_IDS]!r} beside it, where vLLM counts one higher; move it in, in the count of outputs"
        )

    def take(key: str) -> Any:
        inside, outside = nested.get(key), values.get(key)
        if inside is not None and outside is not None and inside != outside:
            raise ValueError(
                f"{key}: expected one value, got {inside} in eagle_config and {outside} beside it"
            )
        return outside if inside is None else inside

    for key, allowed in _FIXED.items():
        if take(key) not in allowed:
            raise ValueError(f"{key}: expected {allowed[-1]!r} or none, got {take(key)!r}; not supported yet")
    kinds = ("qwen3",) if architecture == DEEPSPEC else _MODEL_TYPES
    decoder = _decoder(values, _EAGLE3_KEYS, kinds)
    layers = take("draft_num_hidden_layers")
    if layers is not None and layers != decoder.num_layers:
        raise ValueError(
            f"draft_num_hidden_layers: expected num_hidden_layers {decoder.num_layers} or none, got {layers}"
        )
    layer_ids = _layer_ids(take)
    num_states = _size("num_aux_hidden_states", take("num_aux_hidden_states"))
    if layer_ids is not None and num_states not in (None, len(layer_ids)):
        raise ValueError(
            f"num_aux_hidden_states: expected {len(layer_ids)} for the layers {list(layer_ids)}, got {num_states}"
        )
    drafted = _size("draft_vocab_size", take("draft_vocab_size"))
    if drafted is not None and not 2 <= drafted <= decoder.vocab_size:
        raise ValueError(
            f"draft_vocab_size: expected 2 to the vocabulary's {decoder.vocab_size}, got {drafted}"
        )
    return EagleSettings(
        kind="eagle3",
        decoder=decoder,
        parallel=architecture == PEAGLE,
        tied=bool(values.get("tie_word_embeddings")),
        wide_layers="all" if architecture == DEEPSPEC and decoder.num_layers > 1 else "first",
        layer_ids=layer_ids,
        num_states=len(layer_ids) if layer_ids is not None else num_states,
        target_hidden_size=_size("target_hidden_size", take("target_hidden_size")) or decoder.hidden_size,
        num_target_layers=_size("num_target_layers", take("num_target_layers")),
        draft_vocab_size=None if drafted == decoder.vocab_size else drafted,
        fc_bias=bool(_flag("bias", take("bias"), False)),
        feature_norms=bool(_same(take, ("fc_norm", "use_aux_norm"), lambda k, v: _flag(k, v, None))),
        norm_before_fc=bool(_flag("norm_before_fc", take("norm_before_fc"), False)),
        norm_output=_flag("norm_output", take("norm_output"), None),
        norm_before_residual=bool(_flag("norm_before_residual", take("norm_before_residual"), False)),
        mask_token_id=_same(take, _MASK_KEYS, _id),
    )


def _decoder(
    values: Mapping[str, Any], own: frozenset[str], kinds: tuple[str, ...] = _MODEL_TYPES
) -> DecoderConfig:
    """The layers' settings, read as those of a language model of their type."""
    added = own | _IGNORED | set(_FIXED) | {"architectures", "tie_word_embeddings"}
    plain = {key: value for key, value in values.items() if key not in added}
    if plain.setdefault("model_type", kinds[0]) not in kinds:
        raise ValueError(f"model_type: expected {' or '.join(kinds)}, got {plain['model_type']!r}")
    plain["tie_word_embeddings"] = False
    return config_from_hf(plain, llama_windows=True)


def _layer_ids(take: Callable[[str], Any]) -> tuple[int, ...] | None:
    stated = {key: take(key) for key in (_LAYER_IDS, "target_layer_ids") if take(key) is not None}
    if len({str(value) for value in stated.values()}) > 1:
        raise ValueError(f"target_layer_ids: expected one list of layers, got {stated}")
    for key, value in stated.items():
        integers = isinstance(value, list) and all(
            isinstance(i, int) and not isinstance(i, bool) and i >= -1 for i in value
        )
        if not integers or not value:
            raise ValueError(
                f"{key}: expected a list of 0-based layer outputs (-1 = the embedding), got {value!r}"
            )
        return tuple(value)
    return None


def _same(take: Callable[[str], Any], keys: tuple[str, ...], check: Callable[[str, Any], Any]) -> Any:
    """The value that some of these keys state, which have to agree; None if none does."""
    stated = {key: check(key, take(key)) for key in keys if take(key) is not None}
    if len(set(stated.values())) > 1:
        raise ValueError(f"{keys[0]}: expected one value, got {stated}")
    return next(iter(stated.values()), None)


def _flag(key: str, value: Any, default: bool | None) -> bool | None:
    if value is None:
        return default
    if not isinstance(value, bool):
        raise ValueError(f"{key}: expected true, false or null, got {value!r}")
    return value


def _id(key: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{key}: expected a token id, got {value!r}")
    return value


def _size(key: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{key}: expected a positive integer or null, got {value!r}")
    return value
