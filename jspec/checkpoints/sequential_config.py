"""The heads of DSpark and Domino in a config.json, read and written.

| layout    | architecture      | keys stand              | block_size counts                    | anchor's row predicts     |
|-----------|-------------------|-------------------------|--------------------------------------|---------------------------|
| SpecForge | DSparkDraftModel  | in dflash_config        | rows, all of which predict           | always                    |
| SGLang    | DSparkDraftModel  | beside dflash_config    | draft tokens                         | sample_from_anchor (true) |
| DeepSpec  | Qwen3DSparkModel  | at the top              | rows, all of which predict           | always                    |
| Domino    | DominoDraftModel  | in dflash_config        | rows                                 | shift_label, to be stated |

Source: SpecForge a6b6b023, modeling/draft/dspark.py and domino.py; SGLang 0.5.23, models/dspark.py and
speculative/dspark_components; deepseek-ai/DeepSpec, modeling/dspark/qwen3/config.py.
"""

from collections.abc import Callable
from typing import Any

from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.domino_head import Gru
from jspec.drafters.dspark_heads import MARKOV_KINDS, Confidence, Markov

DSPARK, DOMINO = "DSparkDraftModel", "DominoDraftModel"
DEEPSPEC = "Qwen3DSparkModel"  # its DFlash is this model without heads
PROJECTORS = {"dspark": DSPARK, "domino": DOMINO}
_MARKOV = ("markov_rank", "markov_head_type")
_CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov")
_GRU = ("gru_hidden_dim", "emb_dim", "pure_draft_prefix_len", "shift_label")
# Keys that say whether there is such a head at all, and the architectures that may have it.
_SWITCHES = {DSPARK: ("markov_rank", "enable_confidence_head"), DOMINO: ("gru_hidden_dim", "shift_label")}
_OF_METHOD = {DSPARK: (DSPARK, DEEPSPEC), DOMINO: (DOMINO,)}
HEAD_KEYS = frozenset({*_MARKOV, *_CONFIDENCE, *_GRU})
# Weights of the loss, and which of two names the layers' attention has; its sizes are stated beside.
IGNORED_HEAD_KEYS = frozenset({"confidence_head_alpha", "attention_mode"})
# Keys that say whether there is such a head at all, and the architectures that may have it.
_SWITCHES = {DSPARK: ("markov_rank", "enable_confidence_head"), DOMINO: ("gru_hidden_dim", "shift_label")}
_OF_METHOD = {DSPARK: (DSPARK, DEEPSPEC), DOMINO: (DOMINO,)}
Take = Callable[[str], Any]


def read_heads(architecture: str, take: Take) -> dict[str, Any]:
    """The fields of a `DFlashConfig` that say its heads.

    Args:
      architecture: by its usual name.
      take: value of a key, None if it is not there.

    Raises:
      ValueError: a key of another method, or a value that cannot be.
    """
    for method, keys in _SWITCHES.items():
        for key in keys if architecture not in _OF_METHOD[method] else ():
            if take(key) not in (None, 0, False):
                raise ValueError(
                    f"{key}: expected none for {architecture}, got {take(key)!r}; such a head makes a {method}"
                )
    if architecture == DOMINO:
        gru = Gru(
            size=_size("gru_hidden_dim", take, 1),
            rank=_size("emb_dim", take, 1),
            first_corrected=1
            if take("pure_draft_prefix_len") is None
            else _size("pure_draft_prefix_len", take, 0),
        )
        return dict(head=gru, confidence=None)
    if architecture not in (DSPARK, DEEPSPEC):
        return dict(head=None, confidence=None)
    rank = 0 if take("markov_rank") is None else _size("markov_rank", take, 0)
    kind = take("markov_head_type") or "vanilla"
    if rank and kind not in MARKOV_KINDS:
        raise ValueError(f"markov_head_type: expected one of {', '.join(MARKOV_KINDS)}, got {kind!r}")
    reads = _flag("confidence_head_with_markov", take)
    return dict(
        head=Markov(rank=rank, kind=kind) if rank else None,
        confidence=Confidence(reads_token=bool(rank) if reads is None else reads and bool(rank))
        if _flag("enable_confidence_head", take)
        else None,
    )


def predicting_anchor(architecture: str, take: Take) -> bool:
    """Whether the anchor's row predicts, as the config declares it or its architecture defines it.

    Raises:
      ValueError: a layout that has both kinds does not say which, or says both.
    """
    stated, shifted = _flag("sample_from_anchor", take), _flag("shift_label", take)
    if architecture == DOMINO:
        if shifted is None:
            raise ValueError(
                "shift_label: expected true or false, got none; Domino drafters are trained either way: add "
                '"shift_label": true to dflash_config if row 0 (the anchor\'s) predicts the token after the anchor, '
                "false if it predicts nothing"
            )
        if stated not in (None, shifted):
            raise ValueError(f"sample_from_anchor: expected shift_label's {shifted} or none, got {stated}")
        return shifted
    if architecture in (DSPARK, DEEPSPEC):
        # Every public trainer makes such drafters this way, and every loader takes it so without the key.
        return True if stated is None else stated
    return bool(stated)


def rows_of_block(architecture: str, block_size: int, anchor_predicts: bool) -> int:
    """Rows of a block whose config states this block_size."""
    return block_size + 1 if architecture in (DSPARK, DEEPSPEC) and not anchor_predicts else block_size


def head_values(config: DFlashConfig) -> dict[str, Any]:
    """What config.json says of the heads and the anchor; SGLang reads these keys at the top, SpecForge nested.

    Raises:
      ValueError: the formats have no such drafter.
    """
    anchor = {"sample_from_anchor": config.anchor_predicts}
    match config.head:
        case Gru() as gru:
            return anchor | {
                "projector_type": "domino",
                "gru_hidden_dim": gru.size,
                "emb_dim": gru.rank,
                "pure_draft_prefix_len": gru.first_corrected,
                "shift_label": config.anchor_predicts,
            }
        case Markov() as markov:
            sizes = {"markov_rank": markov.rank, "markov_head_type": markov.kind}
        case None if config.confidence is None:
            return {}
        case None:
            sizes = {"markov_rank": 0}
    return (
        anchor
        | {"projector_type": "dspark"}
        | sizes
        | {
            "enable_confidence_head": config.confidence is not None,
            "confidence_head_with_markov": config.confidence is not None and config.confidence.reads_token,
        }
    )


def stated_block_size(config: DFlashConfig) -> int:
    """The block_size that a written config states; see `rows_of_block`."""
    return config.longest_draft if config.method == "DSpark" else config.block_size


def _flag(key: str, take: Take) -> bool | None:
    value = take(key)
    if value is not None and not isinstance(value, bool):
        raise ValueError(f"{key}: expected true, false or null, got {value!r}")
    return value


def _size(key: str, take: Take, least: int) -> int:
    value = take(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{key}: expected an integer from {least} on, got {value!r}; the checkpoint's config has to state it"
        )
    return value
