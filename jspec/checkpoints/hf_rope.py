"""The rotary settings of a Hugging Face config, in the old form and in that of transformers 5."""

from collections.abc import Mapping
from typing import Any

from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Linear, Llama3, Rope, Yarn, yarn_attention_factor

# Keys that each rule reads; any other one is refused.
RULES: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_EVERY_RULE = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


def rope_from_hf(
    settings: Mapping[str, Any] | None, *, theta: float | None, max_position: int, original: int | None = None
) -> Rope:
    """One layer kind's rotary embedding.

    Args:
      settings: the `rope_parameters` or `rope_scaling` dict, or None.
      theta: the base that stands beside them, or the documented default; None if there is neither.
      max_position: `max_position_embeddings`, which transformers takes for a missing original context.
      original: `original_max_position_embeddings` beside the dict, if there.

    Raises:
      ValueError: for a rule we do not have, a missing or unknown key, or two values that disagree.
    """
    settings = dict(settings or {})
    kinds = {str(settings[key]) for key in ("rope_type", "type") if settings.get(key) is not None}
    kind = kinds.pop() if kinds else "default"
    if kinds or kind not in RULES:
        raise ValueError(
            f"rope_type: expected one of {', '.join(RULES)}, got {' and '.join([kind, *kinds])}; "
            "no other rule is supported: use a model that was trained with one of these"
        )
    unknown = sorted(set(settings) - _EVERY_RULE - RULES[kind])
    if unknown:
        raise ValueError(
            f"rope_scaling: expected no key {unknown[0]!r} for rope_type {kind!r}, "
            f"got {settings[unknown[0]]!r}; remove it if the model was trained without it"
        )
    if settings.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ValueError(
            f"partial_rotary_factor: expected 1, got {settings['partial_rotary_factor']}; not supported"
        )
    own = settings.get("rope_theta")
    if own is not None and theta is not None and own != theta:
        raise ValueError(
            f"rope_theta: expected one value, got {own} in the rope settings and {theta} beside them"
        )
    base = own if own is not None else theta
    if base is None:
        raise ValueError("rope_theta: expected a number, got none; add it, the model's maths depends on it")
    return Rope(theta=_number("rope_theta", base), scaling=_scaling(kind, settings, max_position, original))


def _scaling(
    kind: str, settings: dict[str, Any], max_position: int, original: int | None
) -> Linear | Llama3 | Yarn | None:
    def need(key: str) -> float:
        if settings.get(key) is None:
            raise ValueError(f"rope_scaling: expected key {key!r} for rope_type {kind!r}, got none; add it")
        return _number(key, settings[key])

    def optional(key: str, default: float | None) -> float | None:
        return default if settings.get(key) is None else _number(key, settings[key])

    if kind == "default":
        return None
    if kind == "linear":
        return Linear(factor=need("factor"))
    stated = optional("original_max_position_embeddings", None)
    if stated is not None and original is not None and stated != original:
        raise ValueError(
            f"original_max_position_embeddings: expected one value, got {stated} in the rope settings "
            f"and {original} beside them"
        )
    context = int(stated or original or max_position)
    if kind == "llama3":
        return Llama3(
            factor=need("factor"),
            low_freq_factor=need("low_freq_factor"),
            high_freq_factor=need("high_freq_factor"),
            original_context=context,
        )
    # An explicit null means the ratio of the two contexts (DeepSeek); a missing key is an omission.
    if "factor" in settings and settings["factor"] is None:
        factor = max_position / context
    else:
        factor = need("factor")
    attention = optional("attention_factor", None)
    if attention is None:
        attention = yarn_attention_factor(factor, optional("mscale", None), optional("mscale_all_dim", None))
    return Yarn(
        factor=factor,
        original_context=context,
        attention_factor=attention,
        beta_fast=optional("beta_fast", None) or 32.0,
        beta_slow=optional("beta_slow", None) or 1.0,
        truncate=bool(settings.get("truncate", True)),
    )


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{key}: expected a positive number, got {value!r}")
    return float(value)


def rope_keys(decoder: DecoderConfig) -> dict[str, Any]:
    """The keys of config.json about the rotary embedding, in the new form and the old one.

    Each is read by somebody who does not know the other; only the new one can state two rules.

    Raises:
      ValueError: see `rope_values`.
    """
    rope = rope_values(decoder.full_rope)
    scaling = None if rope["rope_type"] == "default" else rope
    if "window" in decoder.layer_kinds and decoder.rope("window") != decoder.full_rope:
        rope, scaling = (
            {"full_attention": rope, "sliding_attention": rope_values(decoder.rope("window"))},
            None,
        )
    return {"rope_parameters": rope, "rope_scaling": scaling, "rope_theta": decoder.full_rope.theta}


def rope_values(rope: Rope) -> dict[str, Any]:
    """The `rope_parameters` of transformers 5 for a rotary embedding.

    Raises:
      ValueError: its frequencies were read from a GGUF file as they are, without the rule behind them.
    """
    stated: dict[str, Any] = {"rope_theta": rope.theta}
    match rope.scaling:
        case None:
            return stated | {"rope_type": "default"}
        case Linear(factor=factor):
            return stated | {"rope_type": "linear", "factor": factor}
        case Llama3() as rule:
            return stated | {
                "rope_type": "llama3",
                "factor": rule.factor,
                "low_freq_factor": rule.low_freq_factor,
                "high_freq_factor": rule.high_freq_factor,
                "original_max_position_embeddings": rule.original_context,
            }
        case Yarn() as rule:
            return stated | {
                "rope_type": "yarn",
                "factor": rule.factor,
                "original_max_position_embeddings": rule.original_context,
                "attention_factor": rule.attention_factor,
                "beta_fast": rule.beta_fast,
                "beta_slow": rule.beta_slow,
                "truncate": rule.truncate,
            }
        case other:
            raise ValueError(
                f"config.decoder.full_rope: expected a rule with a name, got {type(other).__name__}; "
                "train with one of those that config.json can state"
            )
