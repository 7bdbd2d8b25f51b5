"""A request on the host: what was asked, how far it is, what it has emitted."""

import dataclasses

from jspec.grammar.constraint import Constraint
from jspec.prefix_cache import Lease
from jspec.results import Counters, Result, TokenLogProb
from jspec.settings import Settings
from jspec.text.output import Output


@dataclasses.dataclass(kw_only=True)
class Request:
    """The host's side of a request. The device's side is a row of `jspec.slots.Slots`."""

    index: int
    prompt_ids: tuple[int, ...]
    settings: Settings
    limit: int  # text length at which it ends
    output: Output
    constraint: Constraint | None = None  # its grammar; it has taken in exactly `token_ids`
    slot: int = -1
    priority: int = 0  # greater ones are admitted first
    client: str | None = None  # whose it is
    turn: float = 0.0  # among the clients; see `jspec.waiting`
    overtaken: int = 0  # times that a later one of greater priority came first
    lease: Lease | None = None  # pages, while it has a slot
    started: float | None = None  # time.perf_counter() when it first got a slot
    committed: int = 0  # tokens in the cache, the prompt's included; of rounds that were read
    executing: int = 0  # known tokens that rounds execute which were launched and not read
    known_at_admission: int = 0  # tokens that are executed before it emits one
    reused: int = 0
    preemptions: int = 0
    inert: int = 0
    declined_rounds: int = 0
    declined: str | None = None  # why the last of them did not draft
    ready: int = 0  # draft tokens that the drafter has at most for the next round
    dry: int = 0  # rounds since it last had any
    token_ids: list[int] = dataclasses.field(default_factory=list)
    log_probs: list[TokenLogProb] = dataclasses.field(default_factory=list)
    prompt_log_probs: list[TokenLogProb] = dataclasses.field(default_factory=list)  # from the second token on
    finish_reason: str | None = None
    proposed: int = 0
    verified: int = 0
    accepted: int = 0
    decode_committed: int = 0
    rounds: int = 0
    drafting_rounds: int = 0
    budget: float = 0.0
    unusable: int = 0
    accept_histogram: list[int] = dataclasses.field(default_factory=list)

    @property
    def known(self) -> int:
        """Tokens of the text so far, the anchor included."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def text(self) -> tuple[int, ...]:
        """The prompt and what was emitted, a final stop token included."""
        return (*self.prompt_ids, *self.token_ids)

    @property
    def reuses(self) -> bool:
        """Whether pages of the prefix cache will do: what is read off a prompt's hidden states needs these."""
        return not self.settings.prompt_log_probs or len(self.prompt_log_probs) == len(self.prompt_ids) - 1

    @property
    def least_known(self) -> int:
        """Fewest tokens of the text once the round in flight has been read, if it does not end there.

        That round emits one at least if it executes the last known token.
        """
        return self.known + (self.executing > 0 and self.committed + self.executing == self.known)

    @property
    def grammar_failed(self) -> bool:
        """Whether its grammar came to a place where it cannot go on."""
        return self.constraint is not None and self.constraint.failure is not None

    @property
    def remaining(self) -> int:
        """Tokens that were known at admission and that no round has been given yet: the prompt's, or what a
        preemption took."""
        return self.known_at_admission - self.committed - self.executing

    @property
    def prefilling(self) -> bool:
        """Whether it has not emitted a token since it was admitted, as far as rounds were read."""
        return self.known_at_admission > self.committed

    def certain(self, chunk: int) -> int:
        """Known tokens that its next round executes, in a bucket of that chunk."""
        return min(self.least_known - self.committed - self.executing, chunk + 1)

    def count(
        self,
        *,
        proposed: int,
        verified: int,
        accepted: int,
        committed: int,
        depth: int,
        budget: float,
        unusable: int,
        declined: str | None,
    ) -> None:
        """Adds one decode round; no path of what it proposed was longer than `depth`.

        `declined` is why the schedule did not draft; None = it did, or there was nothing to verify.
        """
        if declined is not None:
            self.declined_rounds, self.declined = self.declined_rounds + 1, declined
        self.budget += budget
        self.unusable += unusable
        self.proposed += proposed
        self.verified += verified
        self.accepted += accepted
        self.decode_committed += committed
        self.rounds += 1
        self.drafting_rounds += verified > 0
        while len(self.accept_histogram) <= max(accepted, min(proposed, depth)):
            self.accept_histogram.append(0)
        self.accept_histogram[accepted] += 1

    def counters(self) -> Counters:
        """The counts so far."""
        return Counters(
            proposed=self.proposed,
            verified=self.verified,
            accepted=self.accepted,
            committed=self.decode_committed,
            emitted=len(self.token_ids),
            rounds=self.rounds,
            drafting_rounds=self.drafting_rounds,
            accept_histogram=tuple(self.accept_histogram),
            budget=self.budget,
            unusable_confidences=self.unusable,
            reused=self.reused,
            preemptions=self.preemptions,
            inert=self.inert,
            declined_rounds=self.declined_rounds,
        )

    def result(self, *, simulated: bool, scheduled: bool, why_off: str | None) -> Result:
        """The finished request as its caller sees it."""
        assert self.finish_reason is not None
        return Result(
            text=self.output.text,
            token_ids=tuple(self.token_ids),
            finish_reason=self.finish_reason,
            prompt_ids=self.prompt_ids,
            counters=self.counters(),
            log_probs=tuple(self.log_probs) if self.settings.log_probs is not None else None,
            prompt_log_probs=tuple(self.prompt_log_probs) if self.settings.prompt_log_probs else None,
            simulated=simulated,
            scheduled=scheduled,
            why_off=why_off,
        )
