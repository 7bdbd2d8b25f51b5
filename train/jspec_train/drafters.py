"""What a recipe says about a drafter's sizes, and what follows from the target where it says nothing."""

from pathlib import Path
from typing import Any

from jspec.drafters.dflash2_layers import Convolution, Selector
from jspec.drafters.dflash_init import dflash_config_for
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.domino_head import Gru
from jspec.drafters.dspark_heads import Confidence, Markov
from jspec.net import NetConfig
from jspec.targets.config import DecoderConfig
from jspec.text.tokenizer import Tokenizer
from jspec_train.recipe_parts import BlockDrafterPart, DominoDrafterPart, DrafterPart, DSparkDrafterPart


def default_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Target layers whose outputs are captured when nobody says which: spread from 1 to the fourth-last.

    Source: SpecForge a6b6b023, `build_target_layer_ids`.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def drafter_config(part: BlockDrafterPart, target: DecoderConfig, mask_token_id: int) -> DFlashConfig:
    """The network of a recipe for a target.

    Raises:
      ValueError: layers that the target does not have, or sizes that do not fit each other.
    """
    layer_ids = part.target_layer_ids or default_layer_ids(target.num_layers, max(part.num_layers, 2))
    return dflash_config_for(
        target,
        block_size=part.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=layer_ids,
        num_layers=part.num_layers,
        window=part.window,
        layer_kinds=part.layer_kinds,
        draft_vocab_size=part.vocabulary,
        intermediate_size=part.intermediate_size,
        num_heads=part.num_heads,
        num_kv_heads=part.num_kv_heads,
        head_size=part.head_size,
        **_added(part),
    )


def _added(part: BlockDrafterPart) -> dict[str, Any]:
    """What the method adds to the backbone."""
    match part:
        case DrafterPart(convolution=convolution, selector=selector):
            return dict(
                convolution=None
                if convolution is None
                else Convolution(taps=convolution.taps, group_size=convolution.group_size),
                selector=None if selector is None else Selector(rank=selector.rank, top_k=selector.top_k),
            )
        case DSparkDrafterPart(markov=markov, confidence=confidence):
            return dict(
                head=None if markov is None else Markov(rank=markov.rank, kind=markov.kind),
                confidence=None
                if confidence == "none"
                else Confidence(reads_token=confidence == "hidden_and_token"),
                anchor_predicts=True,
            )
        case DominoDrafterPart(gru=gru, anchor_predicts=anchor_predicts):
            head = Gru(size=gru.size, rank=gru.rank, first_corrected=gru.first_corrected)
            return dict(head=head, anchor_predicts=anchor_predicts)
    raise AssertionError(f"a drafter without a network: {type(part).__name__}")


def mask_token(given: int | None, tokenizer: Tokenizer, vocab_size: int) -> int:
    """The id that stands for the unknown tokens of a block.

    Args:
      given: explicitly; must be in the vocabulary.
      tokenizer: of the target: asked for a token called <mask> or [MASK].
      vocab_size: rows of the target's embedding; the first one that no token uses is the second choice.

    Raises:
      ValueError: out of range, or there is neither.
    """
    if given is not None:
        if given >= vocab_size:
            raise ValueError(
                f"drafter.mask_token_id: expected 0 to {vocab_size - 1}, got {given}; the target has no such embedding"
            )
        return given
    for name in ("<mask>", "[MASK]", "<|mask|>"):
        found = tokenizer.backend.token_to_id(name)
        if found is not None:
            return found
    if tokenizer.vocab_size < vocab_size:
        return tokenizer.vocab_size
    raise ValueError(
        "drafter.mask_token_id: expected an id, got None, and the target has neither a mask token nor a free embedding "
        "row; name a special token that no text uses"
    )


def other_sizes(wanted: NetConfig, held: NetConfig, folder: Path) -> ValueError:
    """The error for weights of another network."""
    return ValueError(
        f"training.warm_start: expected a drafter ({wanted.identity}), got ({held.identity}) in {folder}; "
        "use its sizes, or start fresh"
    )
