"""What a reply tells of speculation: the counters of its request, and why there was none."""

from typing import Any

from jspec.engine import Engine
from jspec.results import Piece, Result
from jspec.settings import Settings


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


def token_details(piece: Piece) -> dict[str, Any]:
    """ "tokens" of a stream's chunk: where each token of the round came from."""
    return {"ids": list(piece.token_ids), "drafted": list(piece.drafted), "verified": piece.verified}
