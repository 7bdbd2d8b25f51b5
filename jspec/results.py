"""What a caller gets back."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenLogProb:
    """One emitted token's log-probability under the raw model logits, before any processor."""

    token_id: int
    log_prob: float
    top: tuple[tuple[int, float], ...] = ()  # (id, log-probability), most likely first


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
    """What is counted of a request; everything else is derived from it.

    Prefill rounds are not counted: `rounds` are those in which the request had an anchor.
    """

    proposed: int = 0  # draft tokens
    verified: int = 0  # draft tokens that the target executed
    accepted: int = 0  # draft tokens that were emitted
    committed: int = 0  # target nodes that entered the cache, the prompt's not included
    emitted: int = 0  # tokens
    rounds: int = 0
    drafting_rounds: int = 0  # rounds in which at least one draft token was verified
    declined_rounds: int = 0  # rounds in which the schedule would not draft, as it would not have paid
    accept_histogram: tuple[int, ...] = ()  # rounds by accept length: index 0, 1, 2, ...
    # Draft tokens that a schedule gave its rounds room to verify, divided evenly among their requests.
    budget: float = 0.0
    unusable_confidences: int = 0  # of draft tokens: NaN or outside [0, 1], read as 1 by the schedule
    reused: int = 0  # prompt tokens that were not executed: the prefix cache had them
    inert: int = 0  # rounds that were launched for it and came to nothing, as it had ended or lost its slot
    preemptions: int = 0  # each executes tokens again, and emits one token in a round that is not counted

    @property
    def mean_commit_length(self) -> float | None:
        """Committed nodes per round (the papers' tau); None before the first round."""
        return self.committed / self.rounds if self.rounds else None

    @property
    def acceptance_rate(self) -> float | None:
        """Accepted per verified draft token; None if nothing was verified."""
        return self.accepted / self.verified if self.verified else None

    def acceptance_by_position(self) -> tuple[float, ...]:
        """Of the rounds that drafted, the fraction whose draft token at position 1, 2, ... was accepted."""
        if not self.drafting_rounds:
            return ()
        reached = [sum(self.accept_histogram[j:]) for j in range(1, len(self.accept_histogram))]
        return tuple(count / self.drafting_rounds for count in reached)


def add(counters: Sequence[Counters]) -> Counters:
    """The sum over several requests."""
    width = max((len(c.accept_histogram) for c in counters), default=0)
    histogram = [0] * width
    for c in counters:
        for index, count in enumerate(c.accept_histogram):
            histogram[index] += count
    return Counters(
        proposed=sum(c.proposed for c in counters),
        verified=sum(c.verified for c in counters),
        accepted=sum(c.accepted for c in counters),
        committed=sum(c.committed for c in counters),
        emitted=sum(c.emitted for c in counters),
        rounds=sum(c.rounds for c in counters),
        drafting_rounds=sum(c.drafting_rounds for c in counters),
        declined_rounds=sum(c.declined_rounds for c in counters),
        accept_histogram=tuple(histogram),
        budget=sum(c.budget for c in counters),
        unusable_confidences=sum(c.unusable_confidences for c in counters),
        reused=sum(c.reused for c in counters),
        preemptions=sum(c.preemptions for c in counters),
        inert=sum(c.inert for c in counters),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """What one round added to one request."""

    index: int  # of the prompt
    text: str  # final text; may be empty while a character or a possible stop string is incomplete
    token_ids: tuple[int, ...]
    drafted: tuple[bool, ...]  # per token: True = a draft token that was accepted
    proposed: int = 0  # draft tokens of a decode round
    verified: int | None = None  # draft tokens that the target executed; None = the round of a prompt's end
    log_probs: tuple[TokenLogProb, ...] | None = None  # one per token; None = not asked for
    # Of the prompt's tokens from the second on, with the request's first piece; None = not asked for.
    prompt_log_probs: tuple[TokenLogProb, ...] | None = None
    finish_reason: str | None = None  # "stop", "length" or "error: ..." on the last piece
    reused: int = 0  # prompt tokens that the prefix cache had; the same on all of a request's pieces


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """A finished request."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    prompt_ids: tuple[int, ...]
    counters: Counters
    log_probs: tuple[TokenLogProb, ...] | None = None
    # Of the prompt's tokens from the second on; None = not asked for.
    prompt_log_probs: tuple[TokenLogProb, ...] | None = None
    scheduled: bool = False  # False: every draft token was verified, for want of a cost table
    why_off: str | None = None  # why there was no speculation, in all or in some rounds; None if there was
    simulated: bool = False  # accept lengths were forced: the text is not the target's
