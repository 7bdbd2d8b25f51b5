"""What a reply tells of speculation: the counters of its request, and why there was none."""

from typing import Any

from jspec.engine import Engine
from jspec.results import Piece, Result
from jspec.settings import Settings
from jspec.text.detokenize import Detokenizer
from jspec.text.tokenizer import Tokenizer


def spec_details(engine: Engine, settings: Settings, result: Result) -> dict[str, Any]:
    """ "spec" of a choice; see `jspec.results.Counters` for what is counted."""
    counters = result.counters
    return {
        "drafter": engine.method.drafter.name,
        "proposed": counters.proposed,
        "verified": counters.verified,
        "accepted": counters.accepted,
        "committed": counters.committed,
        "emitted": counters.emitted,
        "rounds": counters.rounds,
        "drafting_rounds": counters.drafting_rounds,
        "accept_histogram": list(counters.accept_histogram),
        "mean_commit_length": counters.mean_commit_length,
        "acceptance_rate": counters.acceptance_rate,
        "preemptions": counters.preemptions,
        "scheduled": result.scheduled,
        "simulated": result.simulated,
        "off": None if counters.verified else why_off(engine, settings, result),
    }


def why_off(engine: Engine, settings: Settings, result: Result) -> str:
    """Why no draft token of a request was verified."""
    if settings.draft_length == 0:
        return "the request turned it off"
    if not engine.method.drafter.draft_length:
        return "the server has no drafter"
    counters = result.counters
    if counters.emitted < 3:
        return "the answer is too short: its first token comes from the prompt, its last is never drafted"
    if result.scheduled and not counters.proposed:
        return "verification costs more than it brings at this load"
    if result.scheduled:
        return "no draft token was likely enough to be verified"
    return "the drafter had nothing to propose"


class TokenDetails:
    """ "tokens" of a stream's chunks: where each token of a choice came from, and what it adds to the text."""

    def __init__(self, tokenizer: Tokenizer):
        """At the beginning of the choice."""
        self._detokenizer = Detokenizer(tokenizer)

    def push(self, piece: Piece) -> dict[str, Any]:
        """Takes the next round. Texts are not held back for stop strings or calls of tools, as the chunk's own are."""
        texts = [self._detokenizer.push([id_]) for id_ in piece.token_ids]
        if piece.finish_reason is not None and texts:
            texts[-1] += self._detokenizer.flush()
        return {
            "ids": list(piece.token_ids),
            "texts": texts,
            "drafted": list(piece.drafted),
            "verified": piece.verified,
        }
