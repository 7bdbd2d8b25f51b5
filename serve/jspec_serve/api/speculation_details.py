"""What a reply tells of speculation: the counters of its request, and why there was none."""

from typing import Any

from jspec.engine import Engine
from jspec.results import Piece, Result


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


def token_details(piece: Piece) -> dict[str, Any]:
    """ "tokens" of a stream's chunk: where each token of the round came from."""
    return {"ids": list(piece.token_ids), "drafted": list(piece.drafted), "verified": piece.verified}
