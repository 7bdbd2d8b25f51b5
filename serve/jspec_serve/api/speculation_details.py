"""What a reply tells of speculation: the counters of its request, and why there was none."""

from typing import Any

from jspec.engine import Engine
from jspec.results import Piece, Result
from jspec.text.detokenize import Detokenizer
from jspec.text.tokenizer import Tokenizer


def spec_details(engine: Engine, result: Result) -> dict[str, Any]:
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
        "declined_rounds": counters.declined_rounds,
        "preemptions": counters.preemptions,
        "inert": counters.inert,
        "scheduled": result.scheduled,
        "simulated": result.simulated,
        "off": result.why_off,
    }


class TokenDetails:
    """ "tokens" of a stream's chunks: where each token of a choice came from, what it adds to the text."""

    def __init__(self, tokenizer: Tokenizer):
        """At the beginning of the choice."""
        self._detokenizer = Detokenizer(tokenizer)

    def push(self, piece: Piece) -> dict[str, Any]:
        """Takes the next round.

        Texts are not held back for stop strings or calls of tools, as the chunk's own are.
        """
        texts = [self._detokenizer.push([id_]) for id_ in piece.token_ids]
        if piece.finish_reason is not None and texts:
            texts[-1] += self._detokenizer.flush()
        return {
            "ids": list(piece.token_ids),
            "texts": texts,
            "drafted": list(piece.drafted),
            "verified": piece.verified,
        }
