"""The config.json of a drafter with a DFlash backbone to a `DFlashConfig`, refusing what it does not understand.

The layers are Qwen3's, so their part of the config is read as a Qwen3 model's, with the same
strictness; what the methods add stands at the top level or under `dflash_config`.
"""

from collections.abc import Callable, Mapping
from typing import Any

from jspec.checkpoints.dflash_speculators import TYPES, is_speculators, plain_values
from jspec.checkpoints.hf_config import config_from_hf
from jspec.checkpoints.sequential_config import (
    DEEPSPEC,
    DOMINO,
    DSPARK,
    HEAD_KEYS,
    IGNORED_HEAD_KEYS,
    PROJECTORS,
    predicting_anchor,
    read_heads,
    rows_of_block,
)
from jspec.drafters.dflash2_layers import Convolution, Selector
from jspec.targets.config import DecoderConfig

ARCHITECTURE = "DFlashDraftModel"
ARCHITECTURE_2 = "DFlash2DraftModel"
# Published under other names: the same keys and tensors.
_ALIASES = {
    "MuseGlimmerAssistantModel": ARCHITECTURE,
    "DFlash2BeamDraftModel": ARCHITECTURE_2,
    "MiniMaxDFlash2DraftModel": ARCHITECTURE_2,
}
ARCHITECTURES = (ARCHITECTURE, ARCHITECTURE_2, DSPARK, DEEPSPEC, DOMINO)
_CONVOLUTION = ("conv_kernel_size", "conv_group_size")
_SELECTOR = ("selector_rank", "selector_top_k")
_OWN = frozenset(
    {
        *("block_size", "target_layer_ids", "mask_token_id", "num_target_layers", "is_causal", "causal"),
        *("sample_from_anchor", "output_multiplier", "final_logit_softcapping", "draft_vocab_size"),
        *_CONVOLUTION,
        *_SELECTOR,
        *HEAD_KEYS,
    }
)
# Keys that other methods and models added to the format, with the values that mean this one's maths.
_FIXED: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1, 1.0),
    "input_embedding_scale": (None, 1, 1.0),
    "use_aux_hidden_state": (None, True),
    "use_gemma_norm": (None, False),
}
# Training settings, a name for the mask token, code to run, and what has been read to name the architecture.
_IGNORED = frozenset(
    {*("mask_token", "num_anchors", "loss_decay_gamma", "auto_map", "projector_type"), *IGNORED_HEAD_KEYS}
)


def read_config(values: Mapping[str, Any]) -> tuple[dict[str, Any], DecoderConfig]:
    """The method's own settings, as fields of `DFlashConfig`, and the settings of its layers.

    Two fields of `DFlashConfig` are not here, as the tensors say them: target_hidden_size and own_embedding.

    Args:
      values: a parsed config.json of SpecForge, SGLang, the `speculators` library or DeepSpec.

    Raises:
      ValueError: on another architecture, or a key that is missing, unknown or contradictory.

    Source: SpecForge, modeling/draft/dflash.py and dflash2.py; SGLang 0.5.23, models/dflash.py and
    speculative/dflash_utils.py; deepseek-ai/DeepSpec, modeling/dspark/qwen3/config.py.
    """
    if is_speculators(values):
        values = plain_values(values)
    nested = values.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"dflash_config: expected a JSON object, got {nested!r}")
    unknown = sorted(set(nested) - _OWN - _IGNORED - set(_FIXED))
    if unknown:
        raise ValueError(
            f"dflash_config: expected no key {unknown[0]!r}, got {nested[unknown[0]]!r}; "
            "it may change the maths: remove it only if you know that it does not"
        )

    def take(key: str) -> Any:
        inside, outside = nested.get(key), values.get(key)
        if inside is not None and outside is not None and inside != outside:
            raise ValueError(
                f"{key}: expected one value, got {inside} in dflash_config and {outside} beside it"
            )
        return outside if inside is None else inside

    architecture = _architecture(values, take("projector_type"))
    for key, allowed in _FIXED.items():
        if take(key) not in allowed:
            raise ValueError(f"{key}: expected {allowed[-1]!r} or none, got {take(key)!r}; not supported yet")
    decoder = _decoder(values)
    anchor_predicts = predicting_anchor(architecture, take)
    if anchor_predicts and architecture == ARCHITECTURE_2:
        raise ValueError(f"sample_from_anchor: expected false or null for {architecture}, got True")
    block_size = _integer("block_size", take("block_size"), 2, None)
    own: dict[str, Any] = dict(
        block_size=rows_of_block(architecture, block_size, anchor_predicts),
        mask_token_id=_integer("mask_token_id", take("mask_token_id"), 0, decoder.vocab_size - 1),
        target_layer_ids=_layer_ids(take("target_layer_ids")),
        num_target_layers=None
        if take("num_target_layers") is None
        else _integer("num_target_layers", take("num_target_layers"), 1, None),
        is_causal=_is_causal(take),
        draft_vocab_size=None
        if take("draft_vocab_size") is None
        else _integer("draft_vocab_size", take("draft_vocab_size"), 2, decoder.vocab_size),
        anchor_predicts=anchor_predicts,
        output_multiplier=_positive("output_multiplier", take("output_multiplier"), 1.0),
        final_softcap=_softcap(take("final_logit_softcapping")),
    )
    own |= _dflash2(architecture, take, own["block_size"], decoder)
    return own | read_heads(architecture, take), decoder


def is_dflash(values: Mapping[str, Any]) -> bool:
    """Whether a config.json says that it is of a drafter with a DFlash backbone."""
    if is_speculators(values):
        return values["speculators_model_type"] in TYPES
    given = values.get("architectures")
    return isinstance(given, list) and len(given) == 1 and _ALIASES.get(given[0], given[0]) in ARCHITECTURES


def copies_of_the_target(values: Mapping[str, Any]) -> str:
    """Pattern of tensors that are frozen copies of the target's in this layout, and are not read.

    DeepSpec and some versions of `speculators` write the head that they trained against; the whole
    vocabulary is the target's own here, so nothing of it is missing.
    """
    if is_speculators(values):
        return r"^(lm_head|verifier_lm_head|verifier_norm)\.weight$|^(t2d|d2t)$"
    return r"^lm_head\.weight$" if values.get("architectures") in ([DEEPSPEC], [DSPARK]) else r"(?!)"


def _architecture(values: Mapping[str, Any], projector: Any) -> str:
    """The usual name of an architecture; a DFlash model with another method's projector is of that method."""
    given = values.get("architectures")
    named = str(given[0]) if isinstance(given, list) and len(given) == 1 else None
    name = None if named is None else _ALIASES.get(named, named)
    if name is None or name not in ARCHITECTURES:
        raise ValueError(
            f"architectures: expected one of {', '.join(ARCHITECTURES)}, got {given}; this is none of them, or of a "
            "kind not supported yet"
        )
    wanted = PROJECTORS.get(str(projector), name)
    own = {ARCHITECTURE: wanted, ARCHITECTURE_2: name, DEEPSPEC: DSPARK}.get(name, name)
    if projector not in (None, "dflash", *PROJECTORS) or PROJECTORS.get(str(projector), own) != own:
        raise ValueError(
            f"projector_type: expected the one of {name} or none, got {projector!r}; not supported yet"
        )
    return wanted if name == ARCHITECTURE else name


def _dflash2(
    architecture: str, take: Callable[[str], Any], block_size: int, decoder: DecoderConfig
) -> dict[str, Any]:
    """The convolution, which either architecture may have, and the selector, which is DFlash 2."""
    taps, group_size = _together(_CONVOLUTION, take)
    rank, top_k = _together(_SELECTOR, take)
    if (rank is not None) != (architecture == ARCHITECTURE_2):
        wanted = "positive integers" if rank is None else "none"
        raise ValueError(
            f"{' and '.join(_SELECTOR)}: expected {wanted} for {architecture}, got {rank} and {top_k}; "
            f"a candidate selector is what makes a {ARCHITECTURE_2}"
        )
    if taps is not None and taps > block_size:
        raise ValueError(f"conv_kernel_size: expected 1 to the block_size {block_size}, got {taps}")
    if group_size is not None and decoder.hidden_size % group_size:
        raise ValueError(
            f"conv_group_size: expected a divisor of the hidden_size {decoder.hidden_size}, got {group_size}"
        )
    drafted = take("draft_vocab_size") or decoder.vocab_size
    if top_k is not None and top_k > drafted:
        raise ValueError(f"selector_top_k: expected at most the {drafted} ids that are drafted, got {top_k}")
    return dict(
        convolution=None
        if taps is None or group_size is None
        else Convolution(taps=taps, group_size=group_size),
        selector=None if rank is None or top_k is None else Selector(rank=rank, top_k=top_k),
    )


def _together(keys: tuple[str, str], take: Callable[[str], Any]) -> tuple[int | None, int | None]:
    """Two sizes of which both or neither are stated; 0 states nothing."""
    sizes = [None if take(key) in (None, 0) else _integer(key, take(key), 1, None) for key in keys]
    if (sizes[0] is None) != (sizes[1] is None):
        raise ValueError(f"{keys[0]}: expected it together with {keys[1]}, got {sizes[0]} and {sizes[1]}")
    return sizes[0], sizes[1]


def _layer_ids(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not value or not all(_is_int(i, -1) for i in value):
        raise ValueError(
            f"target_layer_ids: expected a list of 0-based layers (-1 = the embedding), got {value!r}; "
            "add the ones that the drafter was trained on: there is no safe default"
        )
    return tuple(value)


def _is_causal(take: Callable[[str], Any]) -> bool | None:
    stated = {take(key) for key in ("is_causal", "causal")} - {None}
    if len(stated) > 1 or not all(isinstance(value, bool) for value in stated):
        raise ValueError(f"is_causal: expected true, false or null, got {' and '.join(map(repr, stated))}")
    return stated.pop() if stated else None


def _softcap(value: Any) -> float | None:
    return None if value in (None, 0) else _positive("final_logit_softcapping", value, None)


def _positive(key: str, value: Any, default: Any) -> Any:
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ValueError(f"{key}: expected a positive number, got {value!r}")
    return float(value)


def _decoder(values: Mapping[str, Any]) -> DecoderConfig:
    """The layers' settings, read as those of a Qwen3 model."""
    added = _OWN | _IGNORED | set(_FIXED) | {"dflash_config", "architectures"}
    qwen = {key: value for key, value in values.items() if key not in added}
    if qwen.setdefault("model_type", "qwen3") != "qwen3":
        raise ValueError(f"model_type: expected 'qwen3', got {qwen['model_type']!r}; not supported yet")
    kinds = qwen.get("layer_types")
    if kinds is None and qwen.get("use_sliding_window"):
        raise ValueError(
            "layer_types: expected the kind of every layer with use_sliding_window, got none; add it"
        )
    if kinds is None:
        qwen["layer_types"] = ["full_attention"] * qwen.get("num_hidden_layers", 0)
    qwen.setdefault("use_sliding_window", "sliding_attention" in (kinds or ()))
    qwen["tie_word_embeddings"] = False  # it has no head to tie
    return config_from_hf(qwen)


def _integer(key: str, value: Any, low: int, high: int | None) -> int:
    if _is_int(value, low) and (high is None or value <= high):
        return value
    wanted = f"an integer from {low} on" if high is None else f"an integer from {low} to {high}"
    raise ValueError(f"{key}: expected {wanted}, got {value!r}; the checkpoint's config has to state it")


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low
