"""Domino: DFlash whose logits a GRU over the block's tokens corrects, drafted left to right as DSpark is."""

import dataclasses

from jspec.drafters.dflash import checked_draft_length
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.domino_head import Gru
from jspec.drafters.dspark import DSpark


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domino(DSpark):
    """See `domino`."""

    name: str = "domino"


def domino(
    config: DFlashConfig, *, draft_length: int | None = None, candidate_pool: int | None = None
) -> Domino:
    """A Domino drafter.

    Args:
      config: with a GRU head.
      draft_length: draft tokens per proposal; None = all rows that predict, which with a predicting anchor is
        one more than SGLang drafts. A shorter one drafts the same first tokens.
      candidate_pool: ids per request that are corrected and drafted, those with the greatest base logits in
        any row: much less work where the vocabulary is large. None = all.

    Raises:
      ValueError: an argument out of range, or a config without a GRU head.

    Source: SGLang 0.5.23, speculative/domino_utils.py, whose pool has 2048 ids. There, all requests draft
    greedily; here, sampled ones draw from the corrected logits, as DSpark's do.
    """
    if not isinstance(config.head, Gru):
        raise ValueError(f"config: expected a drafter with a GRU head, got ({config.identity}); use dspark()")
    if candidate_pool is not None and candidate_pool < 2:
        raise ValueError(f"candidate_pool: expected at least 2 ids, or None for all, got {candidate_pool}")
    return Domino(
        config=config,
        draft_length=checked_draft_length(config, draft_length),
        candidate_pool=candidate_pool,
    )
