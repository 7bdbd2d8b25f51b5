"""What the next round is, which may have to be decided before the one in flight is read."""

from collections.abc import Collection, Sequence
from typing import Any

from jspec.buckets import Bucket, Ladder
from jspec.flight import Flight
from jspec.grammar.overlap import GrammarOverlap
from jspec.request import Request
from jspec.runner import Runner
from jspec.schedule.scheduler import Decision, Lanes, Scheduler
from jspec.sharding import first_process_decides
from jspec.timings import Timings
from jspec.waiting import rank

# Rounds without a draft token, behind which none is expected: where some come then, one round goes without.
PATIENCE = 8


class Planner:
    """Chooses the requests and the bucket of the next round, and gives it to the device.

    What the round in flight will have done is not known, but bounds are: it executes what it was given, it
    emits a token at least where it executes the last known one, and it may leave as many draft tokens as a
    request can have. Whether the next round can go ahead depends on these bounds and on rounds that were
    read, never on tokens that are not known yet; so does the schedule's decision, whose survival is two
    rounds old by then.
    """

    def __init__(
        self,
        *,
        runner: Runner,
        ladder: Ladder,
        scheduler: Scheduler | None,
        timings: Timings | None,
        grammar_overlap: GrammarOverlap,
        mixed: bool,
    ):
        """See `jspec.session.Session`."""
        self._runner, self._ladder = runner, ladder
        self._mixed = mixed
        self._scheduler, self._timings, self._grammar_overlap = scheduler, timings, grammar_overlap

    def launch(
        self, running: Collection[Request], *, bucket: Bucket | None = None, prompt_waits: bool = False
    ) -> Flight | None:
        """The next round; None if the one in flight has to be read first.

        Args:
          running: requests with a slot.
          bucket: of the round, if it decodes; None = the best. With one, prompts are executed alone.
          prompt_waits: another prompt could begin if what is in flight were read.
        """
        going = sorted((r for r in running if r.least_known < r.limit), key=lambda r: r.slot)
        prompt = min((r for r in going if r.remaining > 0), key=rank, default=None)
        decoding = going
        if prompt is not None:
            decoding = [r for r in going if r.remaining <= 0] if self._mixed and bucket is None else []
            going = [*decoding, prompt]
        if self._grammar_overlap != "one" and any(
            request.constraint is not None and request.executing for request in going
        ):
            return None
        if prompt is not None and not decoding:
            return self._given(self._ladder.prefill(prompt.remaining), going)
        if not going or (prompt is None and prompt_waits and any(r.prefilling for r in running)):
            return None
        if bucket is not None:
            return self._given(bucket, going)
        most = [self._ready(request) for request in decoding]
        if self._scheduler is None:
            # A drafter that has fewer draft tokens at times, such as one that looks for repeated text, is
            # waited for: room for draft tokens that do not come costs more than that. But not on and on.
            likely = [min(request.ready, ready) for request, ready in zip(decoding, most, strict=True)]
            assumed = [0 if r.dry >= PATIENCE else ready for r, ready in zip(decoding, most, strict=True)]
            best = self._bucket(prompt, assumed)
            return self._given(best, going) if best == self._bucket(prompt, likely) else None
        lanes = Lanes(
            slots=tuple(request.slot for request in decoding),
            generations=tuple(self._runner.generations[request.slot] for request in decoding),
            ready=tuple(most),
            least_survival=tuple(request.settings.min_confidence for request in decoding),
            context=sum(request.committed + request.executing for request in decoding),
        )
        decision = self._scheduler.choose(lanes)
        chosen = decision.bucket
        if prompt is not None:
            # As many draft tokens as without the prompt: a chunk takes as long whatever is verified beside it.
            drafts = min(chosen.nodes - len(decoding), sum(most)) if chosen.budget else 0
            chosen = self._ladder.mixed(prompt.remaining, [drafts])
        # What a host has of old confidences depends on its copies' arrival.
        count, nodes, chunk = first_process_decides((chosen.lanes, chosen.nodes, chosen.chunk))
        return self._given(Bucket(lanes=count, nodes=nodes, chunk=chunk), going, decision)

    def learn(self, flight: Flight) -> None:
        """Tells the schedule of a round that has been read."""
        if self._scheduler is None or flight.decision is None or not flight.bucket.budget:
            return
        survival: Any = flight.launched.round.survival  # a jax.Array, which has is_ready
        decoding = flight.requests[: len(flight.decision.lanes.slots)]
        self._scheduler.publish(flight.decision, survival, here=[r is not None for r in decoding])

    def _bucket(self, prompt: Request | None, drafts: Sequence[int]) -> Bucket:
        """The one for decoding lanes that propose so many tokens each, and for a prompt's chunk besides."""
        if prompt is None:
            return self._ladder.decode(len(drafts), drafts)
        return self._ladder.mixed(prompt.remaining, drafts)

    def _ready(self, request: Request) -> int:
        """Most draft tokens that its next round can use. The last one that a request may emit is a bonus."""
        drafts = self._runner.draft_cap(request) if request.executing else request.ready
        room = max(request.limit - request.least_known - 1, 0)
        is_tree = self._runner.method.drafter.draft_depth < self._runner.method.drafter.draft_length
        return drafts if is_tree and room else min(drafts, room)

    def _given(self, bucket: Bucket, going: Sequence[Request], decision: Decision | None = None) -> Flight:
        masks_first = self._grammar_overlap == "none"
        launched = self._runner.launch(bucket, going, self._timings, masks_first=masks_first)
        for request, certain in zip(going, launched.certain, strict=True):
            request.executing += certain
        return Flight(bucket=bucket, requests=list(going), launched=launched, decision=decision)
