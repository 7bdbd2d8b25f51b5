"""The drafter that a recipe describes: its sizes, and the weights to start from."""

import numpy as np

from jspec.drafters.dflash2_layers import Convolution, Selector
from jspec.drafters.dflash_net import DFlashConfig
from jspec.targets.config import DecoderConfig
from jspec.text.tokenizer import Tokenizer
from jspec_train.data.batches import Samples
from jspec_train.recipe import DrafterPart


def default_layer_ids(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """Target layers whose outputs are captured when nobody says which: spread from 1 to the fourth-last.

    Source: SpecForge a6b6b023, `build_target_layer_ids`.
    """
    if num_layers == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    return tuple(round(1 + i * span / (num_layers - 1)) for i in range(num_layers))


def drafter_config(part: DrafterPart, target: DecoderConfig, mask_token_id: int) -> DFlashConfig:
    """The network of a recipe for a target.

    Raises:
      ValueError: layers that the target does not have, or sizes that do not fit each other.
    """
    layer_ids = part.target_layer_ids or default_layer_ids(target.num_layers, max(part.num_layers, 2))
    missing = [i for i in layer_ids if not -1 <= i < target.num_layers]
    if missing:
        raise ValueError(
            f"drafter.target_layer_ids: expected -1 (the embedding) to {target.num_layers - 1}, got {missing[0]}; "
            f"the target has {target.num_layers} layers"
        )
    if len(set(layer_ids)) != len(layer_ids):
        raise ValueError(
            f"drafter.target_layer_ids: expected different layers, got {list(layer_ids)}; drop one"
        )
    kinds = part.layer_kinds or (("full" if part.window is None else "window"),) * part.num_layers
    head_size = part.head_size or target.head_size
    decoder = DecoderConfig(
        architecture="qwen3",
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=part.intermediate_size or target.intermediate_size,
        num_layers=part.num_layers,
        num_heads=part.num_heads or target.num_heads,
        num_kv_heads=part.num_kv_heads or target.num_kv_heads,
        head_size=head_size,
        norm_eps=target.norm_eps,
        max_context=target.max_context,
        full_rope=target.full_rope,
        window_rope=target.full_rope if "window" in kinds else None,
        layer_kinds=kinds,
        window=part.window if "window" in kinds else None,
        query_key_norm=True,
        query_scale=head_size**-0.5,
    )
    convolution, selector = part.convolution, part.selector
    return DFlashConfig(
        decoder=decoder,
        block_size=part.block_size,
        mask_token_id=mask_token_id,
        target_layer_ids=tuple(layer_ids),
        num_target_layers=target.num_layers,
        target_hidden_size=target.hidden_size,
        draft_vocab_size=part.vocabulary,
        convolution=None
        if convolution is None
        else Convolution(taps=convolution.taps, group_size=convolution.group_size),
        selector=None if selector is None else Selector(rank=selector.rank, top_k=selector.top_k),
    )


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


def draft_vocabulary(source: Samples, size: int, vocab_size: int) -> np.ndarray:
    """The `size` ids that are trained on most often, ascending; ties go to the lower id, also among unseen ones.

    Args:
      source: the training data; all of it is read.
      size: ids wanted.
      vocab_size: of the target.

    Raises:
      ValueError: more ids than the target has.
    """
    if size > vocab_size:
        raise ValueError(
            f"drafter.vocabulary: expected at most {vocab_size} ids, the target's vocabulary, got {size}; lower it"
        )
    counts = np.zeros(vocab_size, np.int64)
    for index in range(len(source)):
        sample = source[index]
        counts += np.bincount(sample.ids[sample.loss_mask], minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)
