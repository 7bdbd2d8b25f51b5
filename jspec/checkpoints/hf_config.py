"""Hugging Face `config.json` to a `DecoderConfig`, refusing what it does not understand.

Every key is read, known not to change the maths, or refused. Missing keys are refused too, except
those with a default in `jspec.checkpoints.hf_keys`.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jspec.checkpoints.hf_keys import (
    ACTIVATIONS,
    AROUND_TEXT,
    CLASSES,
    DEFAULTS,
    FIXED,
    IGNORED,
    IGNORED_BY,
    MODEL_TYPES,
)
from jspec.checkpoints.hf_rope import rope_from_hf
from jspec.targets.config import DecoderConfig, LayerKind, layer_kinds
from jspec.targets.rope import Rope

_ROPE_KINDS = frozenset({"full_attention", "sliding_attention"})


def config_from_hf(values: Mapping[str, Any], *, llama_windows: bool = False) -> DecoderConfig:
    """Reads the parsed `config.json` of a Llama, Qwen2, Qwen3 or Gemma 3 (text part) model.

    Args:
      values: the settings.
      llama_windows: a Llama's `layer_types` and `sliding_window` count. Drafters are written so; as a target it
        has no windows, whatever its config says, so there the keys are refused.

    Raises:
      ValueError: on an unknown architecture, a missing or unknown key, or a value that asks for
        maths that is not implemented; the message names the key.

    Source: the config classes and modelling code of transformers 5.24.
    """
    model_type = values.get("model_type")
    if model_type not in MODEL_TYPES:
        raise ValueError(
            f"model_type: expected one of {', '.join(MODEL_TYPES)}, got {model_type!r}; "
            "this architecture is not supported as a target"
        )
    classes = values.get("architectures")
    if classes is not None and not set(classes) <= CLASSES[model_type]:
        raise ValueError(
            f"architectures: expected {' or '.join(sorted(CLASSES[model_type]))} for {model_type}, "
            f"got {classes}; this is no language model that can be a target"
        )
    if model_type == "gemma3":
        values = _text_part(values)
    if model_type == "llama" and llama_windows:
        values = {"layer_types": None, "sliding_window": None, **values}
    return _read(MODEL_TYPES[model_type], values, llama_windows)


def _text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"text_config: expected the settings of the text model, got {text!r}")
    outer = {k: v for k, v in values.items() if k != "text_config" and k not in AROUND_TEXT | IGNORED}
    tie = outer.pop("tie_word_embeddings", None)
    merged = dict(text)
    if tie is not None and merged.setdefault("tie_word_embeddings", tie) != tie:
        raise ValueError(
            f"tie_word_embeddings: expected one value, got {tie} outside text_config and not inside"
        )
    for key, value in outer.items():
        if key not in FIXED or value not in FIXED[key]:
            raise ValueError(f"{key}: expected no such key beside text_config, got {value!r}; not supported")
    return merged


@dataclasses.dataclass(frozen=True)
class _Keys:
    """A config with its defaults; every key that is asked for counts as understood."""

    architecture: str
    values: Mapping[str, Any]
    asked: set[str] = dataclasses.field(default_factory=set)

    def take(self, key: str) -> Any:
        self.asked.add(key)
        if key in self.values:
            return self.values[key]
        if key in DEFAULTS[self.architecture]:
            return DEFAULTS[self.architecture][key]
        raise ValueError(
            f"{key}: expected a value for a {self.architecture} model, got none; "
            "add it, the model's maths depends on it"
        )

    def size(self, key: str) -> int:
        value = self.take(key)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{key}: expected a positive integer, got {value!r}")
        return value

    def number(self, key: str) -> float:
        value = self.take(key)
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not value > 0
            or math.isinf(value)
        ):
            raise ValueError(f"{key}: expected a positive number, got {value!r}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.take(key)
        if not isinstance(value, bool):
            raise ValueError(f"{key}: expected true or false, got {value!r}")
        return value

    def finish(self) -> None:
        """Refuses every key that nobody asked for and that is not known to be harmless."""
        harmless = IGNORED | IGNORED_BY.get(self.architecture, frozenset())
        for key, value in self.values.items():
            if key in FIXED:
                if value not in FIXED[key]:
                    raise ValueError(
                        f"{key}: expected {' or '.join(map(repr, FIXED[key]))}, got {value!r}; not supported"
                    )
            elif key not in self.asked and key not in harmless:
                raise ValueError(
                    f"{key}: expected no such key for a {self.architecture} model, got {value!r}; "
                    "it may change the maths: remove it only if you know that it does not"
                )


def _read(architecture: str, values: Mapping[str, Any], llama_windows: bool) -> DecoderConfig:
    keys = _Keys(architecture, values)
    gemma, qwen = architecture == "gemma3", architecture in ("qwen2", "qwen3")
    hidden_size, num_heads = keys.size("hidden_size"), keys.size("num_attention_heads")
    num_layers, max_position = keys.size("num_hidden_layers"), keys.size("max_position_embeddings")
    num_kv_heads = num_heads if keys.take("num_key_value_heads") is None else keys.size("num_key_value_heads")
    if keys.take("head_dim") is not None:
        head_size = keys.size("head_dim")
    elif hidden_size % num_heads == 0:
        head_size = hidden_size // num_heads
    else:
        raise ValueError(
            f"head_dim: expected a value, as {num_heads} heads do not divide hidden_size {hidden_size}"
        )
    activation = keys.take("hidden_activation" if gemma else "hidden_act")
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"hidden_act: expected one of {', '.join(ACTIVATIONS)}, got {activation!r}; not supported"
        )
    attention_bias = keys.flag("attention_bias") if architecture != "qwen2" else False
    kinds, window = _layers(keys, num_layers, gemma=gemma, qwen=qwen, llama_windows=llama_windows)
    full_rope, window_rope = _ropes(keys, max_position, gemma=gemma)
    config = DecoderConfig(
        architecture=architecture,
        vocab_size=keys.size("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=keys.size("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        norm_eps=keys.number("rms_norm_eps"),
        max_context=max_position,
        full_rope=full_rope,
        window_rope=window_rope if window is not None else None,
        layer_kinds=kinds,
        window=window,
        activation="silu" if ACTIVATIONS[activation] == "silu" else "gelu_tanh",
        qkv_bias=attention_bias or architecture == "qwen2",
        output_bias=attention_bias,
        mlp_bias=keys.flag("mlp_bias") if architecture == "llama" else False,
        query_key_norm=architecture in ("qwen3", "gemma3"),
        sandwich_norms=gemma,
        tied_head=keys.flag("tie_word_embeddings"),
        embedding_scale=math.sqrt(hidden_size) if gemma else 1.0,
        query_scale=(keys.number("query_pre_attn_scalar") if gemma else head_size) ** -0.5,
        final_softcap=keys.number("final_logit_softcapping")
        if gemma and keys.take("final_logit_softcapping") is not None
        else None,
    )
    keys.finish()
    return config


def _layers(
    keys: _Keys, num_layers: int, *, gemma: bool, qwen: bool, llama_windows: bool
) -> tuple[tuple[LayerKind, ...], int | None]:
    """Which layers have a window, and its size (null if no layer has one)."""
    if not (gemma or qwen or llama_windows):
        return layer_kinds([False] * num_layers), None
    window = keys.take("sliding_window")
    if qwen and not keys.flag("use_sliding_window"):
        window = None
    types = keys.take("layer_types")
    if gemma:
        pattern = keys.size("sliding_window_pattern")
        derived = [bool((i + 1) % pattern) for i in range(num_layers)]
    elif not qwen:
        if types is None and window is not None:
            raise ValueError(
                f"layer_types: expected the kind of every layer with sliding_window {window}, got none; add it"
            )
        derived = [False] * num_layers
    else:
        first = keys.take("max_window_layers")
        derived = [window is not None and i >= first for i in range(num_layers)]
    kinds = {"full_attention": False, "sliding_attention": True}
    if types is None:
        windows = derived
    elif len(types) == num_layers and set(types) <= set(kinds):
        windows = [kinds[kind] for kind in types]
    else:
        raise ValueError(f"layer_types: expected {num_layers} of {' or '.join(kinds)}, got {types}")
    if not any(windows):
        return layer_kinds([False] * num_layers), None
    if isinstance(window, bool) or not isinstance(window, int) or window < 1:
        raise ValueError(
            f"sliding_window: expected a positive integer for the sliding layers, got {window!r}"
            + ("; set use_sliding_window to true" if qwen else "")
        )
    return layer_kinds(windows), window


def _ropes(keys: _Keys, max_position: int, *, gemma: bool) -> tuple[Rope, Rope]:
    """Rotary settings of the full and of the window layers."""
    new, old = keys.take("rope_parameters"), keys.take("rope_scaling")
    for key, settings in (("rope_parameters", new), ("rope_scaling", old)):
        if settings is not None and not isinstance(settings, Mapping):
            raise ValueError(f"{key}: expected a dict or null, got {settings!r}")
    if new and old and new != old:
        raise ValueError(
            "rope_parameters: expected it alone or equal to rope_scaling, got both and they differ"
        )
    original = keys.take("original_max_position_embeddings")
    full, window = new or old, new or old
    if new and (gemma or set(new) & _ROPE_KINDS):
        if not set(new) <= _ROPE_KINDS:
            raise ValueError(
                f"rope_parameters: expected full_attention and sliding_attention inside, got {sorted(new)}"
            )
        full, window = new.get("full_attention"), new.get("sliding_attention")
        for kind in (full, window):
            if kind is not None and not isinstance(kind, Mapping):
                raise ValueError(f"rope_parameters: expected a dict per layer kind, got {kind!r}")
    elif gemma:
        window = None  # The old form scales the full layers only.
    base = _theta(keys, "rope_theta", full)
    if gemma:
        window_base = _theta(keys, "rope_local_base_freq", window)
    else:
        window_base = base if window is full or not _states_theta(window) else None
    return (
        rope_from_hf(full, theta=base, max_position=max_position, original=original),
        rope_from_hf(window, theta=window_base, max_position=max_position, original=original),
    )


def _theta(keys: _Keys, key: str, settings: Mapping[str, Any] | None) -> Any:
    """The base beside the rope settings; the default counts only if they do not hold one either."""
    value = keys.take(key)
    return None if _states_theta(settings) and key not in keys.values else value


def _states_theta(settings: Mapping[str, Any] | None) -> bool:
    return settings is not None and settings.get("rope_theta") is not None
