"""Requests that come and go: added at any time, moved on by one round at a time."""

import bisect
import time
from collections.abc import Callable, Sequence

from jspec.buckets import Bucket, Ladder
from jspec.cut import Finish
from jspec.decode import Report, Round
from jspec.grammar.overlap import GrammarOverlap
from jspec.intake import Intake
from jspec.prompts import Prompt
from jspec.request import Request
from jspec.results import Piece, Result, TokenLogProb
from jspec.runner import Runner
from jspec.schedule.scheduler import Lanes, Scheduler
from jspec.settings import Settings
from jspec.timings import Timings

# Called after every round with its requests by lane, its bucket, the round and the report.
Observer = Callable[[Sequence[Request], Bucket, Round, Report], None]


class Session:
    """One user's requests on an engine. Close it, or use it in a `with` statement, to free their slots.

    Example:
      with engine.session() as session:
          session.add(["Once upon a time"], jspec.Settings(max_tokens=64))
          while session.busy:
              for piece in session.step():
                  print(piece.text, end="")
    """

    def __init__(
        self,
        *,
        runner: Runner,
        intake: Intake,
        ladder: Ladder,
        scheduler: Scheduler | None,
        grammar_overlap: GrammarOverlap,
        timings: Timings | None = None,
        observer: Observer | None = None,
    ):
        """See `jspec.engine.Engine.session`."""
        self._runner, self._intake, self._ladder, self._scheduler = runner, intake, ladder, scheduler
        self._timings, self._observer, self._grammar_overlap = timings, observer, grammar_overlap
        self._waiting: list[Request] = []  # in the order in which they will be admitted
        self._running: dict[int, Request] = {}  # by slot
        self._requests: dict[int, Request] = {}  # by number, until they are forgotten
        self._next_index = 0

    def add(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: Settings | Sequence[Settings] | None = None,
        *,
        priority: int = 0,
    ) -> list[int]:
        """Puts requests at the end of the queue; see `Engine.generate` for prompts and settings.

        Args:
          prompts: one or several.
          settings: for all of them, or one each.
          priority: requests of a greater one are admitted first, and may have running ones of a lesser one put
            back into the queue. Within one, the first to come is the first to be admitted.

        Returns:
          Their numbers, which pieces carry as `index`: 0, 1, 2, ... in the order in which they were added.

        Raises:
          ValueError: a prompt or a setting is unusable; none of them was added then.
        """
        return self.enqueue(self._intake.requests(prompts, settings), priority=priority)

    def enqueue(self, requests: Sequence[Request], *, priority: int = 0) -> list[int]:
        """Puts requests that `Engine.prepare` made into the queue; see `add`.

        Returns:
          Their numbers, as `add` does.
        """
        for request in requests:
            request.index, request.priority = self._next_index, priority
            self._next_index += 1
            self._requests[request.index] = request
            bisect.insort(self._waiting, request, key=_rank)
        return [request.index for request in requests]

    def cancel(self, index: int) -> None:
        """Ends the request of that number, if it has not ended, and frees its slot; it gives no more pieces."""
        request = self._requests[index]
        if request.finish_reason is not None:
            return
        request.finish_reason = "cancelled"
        if self._running.get(request.slot) is request:
            self._runner.leave(request)
            del self._running[request.slot]
        else:
            self._waiting = [other for other in self._waiting if other is not request]

    def forget(self, index: int) -> None:
        """Drops a request that has ended, so that a session without end does not grow.

        Raises:
          ValueError: it still waits or runs.
        """
        if self._requests[index].finish_reason is None:
            raise ValueError(
                f"index: expected a request that has ended, got {index}, which has not; cancel it first"
            )
        del self._requests[index]

    @property
    def busy(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._waiting or self._running)

    @property
    def prefilling(self) -> bool:
        """Whether a request has prompt tokens to execute before it can decode."""
        return bool(self._waiting) or any(request.prefilling for request in self._running.values())

    @property
    def num_running(self) -> int:
        """Requests that have a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that have no slot yet."""
        return len(self._waiting)

    def result(self, index: int) -> Result:
        """The request of that number, which has ended."""
        scheduled = self._scheduler is not None
        simulated = self._runner.method.drafter.simulated
        return self._requests[index].result(simulated=simulated, scheduled=scheduled)

    def step(self, bucket: Bucket | None = None) -> list[Piece]:
        """Admits what fits, runs one round, and returns what it added.

        Args:
          bucket: of the next round if it decodes, to measure it; None = the one of most tokens per second,
            or without a schedule the one that holds every draft token.

        Raises:
          RuntimeError: nothing runs, and the first that waits finds no slot or no room in the cache.
        """
        if not self.busy:
            return []
        self._admit()
        if not self._running:
            first, prefixes = self._waiting[0], self._runner.prefixes
            raise RuntimeError(
                f"prompts[{first.index}]: expected a free slot and cache for {first.limit} tokens, got "
                f"{len(self._runner.free_slots)} slots and {prefixes.free_pages[0] * prefixes.pool.page_size} "
                "tokens; finish or close other streams"
            )
        prefilling = self._prefilling()
        if prefilling is not None:
            return self._round(self._ladder.prefill(prefilling.remaining), [prefilling])
        active = [self._running[slot] for slot in sorted(self._running)]
        if bucket is not None:
            return self._round(bucket, active)
        if self._scheduler is None:
            return self._round(self._ladder.decode(len(active), [r.ready for r in active]), active)
        lanes = Lanes(
            slots=tuple(request.slot for request in active),
            generations=tuple(self._runner.generations[request.slot] for request in active),
            ready=tuple(request.ready for request in active),
            context=sum(request.committed for request in active),
        )
        bucket = self._scheduler.choose(lanes)
        return self._round(bucket, active, lanes)

    def _admit(self) -> None:
        """Gives slots to those whose turn it is.

        A request comes in when the prompts before it are done, not earlier: only then does it find in the
        prefix cache what they have in common.
        """
        while self._waiting:
            request, prefilling = self._waiting[0], self._prefilling()
            if prefilling is not None and prefilling.priority >= request.priority:
                return
            if self._runner.admit(request):
                del self._waiting[0]
                self._running[request.slot] = request
                if request.started is None:
                    request.started = time.perf_counter()
                continue
            victims = self._victims(request)
            if not victims:
                return
            for victim in victims:
                self.preempt(victim.index)

    def _prefilling(self) -> Request | None:
        """The running request whose prompt is executed next."""
        return min((r for r in self._running.values() if r.prefilling), key=_rank, default=None)

    def _victims(self, request: Request) -> list[Request]:
        """Running requests of lesser priority that have to go so that this one can come in; none if that
        does not help."""
        lesser = [r for r in self._running.values() if r.priority < request.priority]
        lesser.sort(key=_rank, reverse=True)
        for count in range(1, len(lesser) + 1):
            if self._runner.has_room(request, lesser[:count]):
                return lesser[:count]
        return []

    def preempt(self, index: int) -> None:
        """Takes a running request's slot and pages, and puts it back into the queue, at its old place.

        It goes on later with the text that it has. What the prefix cache still has of it then is not executed
        again. A greedy request, or one with a seed, emits what it would have emitted.

        Raises:
          ValueError: it is not running.
        """
        request = next((r for r in self._running.values() if r.index == index), None)
        if request is None:
            raise ValueError(
                f"index: expected one of the running requests {sorted(r.index for r in self._running.values())}, "
                f"got {index}; a request that waits or has finished has no slot to give up"
            )
        del self._running[request.slot]
        self._runner.leave(request)
        request.committed = request.ready = 0
        request.preemptions += 1
        bisect.insort(self._waiting, request, key=_rank)

    def _round(self, bucket: Bucket, active: list[Request], lanes: Lanes | None = None) -> list[Piece]:
        round_, report = self._runner.round(
            bucket, active, self._timings, grammar_overlap=self._grammar_overlap
        )
        if lanes is not None and self._scheduler is not None and bucket.budget:
            self._scheduler.publish(lanes, round_.survival)  # type: ignore[arg-type]  # arrays have is_ready
        if self._observer is not None:
            self._observer(active, bucket, round_, report)
        pieces, budget = [], bucket.nodes - len(active) if bucket.budget else 0
        for lane, request in enumerate(active):
            piece = self._take(request, lane, report, budget / len(active))
            if report.finish[lane] == Finish.BROKEN and not _failed_by_grammar(request):
                self._runner.distrust(request)
            else:
                self._runner.publish(request)
            if request.finish_reason is not None:
                self._runner.leave(request)
                del self._running[request.slot]
            if piece is not None:
                pieces.append(piece)
        return pieces

    def close(self) -> None:
        """Frees the slots of what still runs, and forgets what waits."""
        self._waiting.clear()
        for request in list(self._running.values()):
            self._runner.leave(request)
        self._running.clear()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, request: Request, lane: int, report: Report, budget: float) -> Piece | None:
        was_prefilling = request.prefilling
        emitted, accepted = int(report.emitted[lane]), int(report.accepted[lane])
        committed = int(report.committed[lane])
        request.committed += committed
        ids = [int(t) for t in report.tokens[lane, :emitted]]
        drafted = [i < accepted for i in range(emitted)]
        finish = Finish(int(report.finish[lane]))
        if _failed_by_grammar(request):
            request.finish_reason = f"error: {request.constraint.failure}"  # type: ignore[union-attr]
        elif finish is Finish.BROKEN:
            request.finish_reason = "error: the target's logits are NaN, or its settings allow no token"
        elif finish is not Finish.RUNNING:
            request.finish_reason = finish.name.lower()
        if request.constraint is not None and (last := request.constraint.advance(ids)) is not None:
            ids, drafted = ids[: last + 1], drafted[: last + 1]
            request.finish_reason = "stop"
        text, stopped_at = request.output.push(ids, last=request.finish_reason is not None)
        if stopped_at is not None:
            ids, drafted = ids[: stopped_at + 1], drafted[: stopped_at + 1]
            request.finish_reason = "stop"
        if not was_prefilling:
            # A stop string cuts the counts as a stop token does on the device: one committed node per token.
            request.count(
                proposed=int(report.proposed[lane]),
                verified=int(report.verified[lane]),
                accepted=sum(drafted),
                committed=min(committed, len(ids)),
                budget=budget,
                unusable=int(report.unusable[lane]),
                depth=self._runner.method.drafter.draft_depth,
            )
        request.token_ids.extend(ids)
        request.ready = self._ready(request, int(report.ready[lane]))
        log_probs = None
        if request.settings.log_probs is not None:
            log_probs = tuple(self._log_probs(request, lane, report, ids))
            request.log_probs.extend(log_probs)
        if not ids and request.finish_reason is None:
            return None
        return Piece(
            index=request.index,
            text=text,
            token_ids=tuple(ids),
            drafted=tuple(drafted),
            proposed=0 if was_prefilling else int(report.proposed[lane]),
            verified=None if was_prefilling else int(report.verified[lane]),
            log_probs=log_probs,
            finish_reason=request.finish_reason,
            reused=request.reused,
        )

    def _ready(self, request: Request, drafts: int) -> int:
        """How many of `drafts` tokens the next round can use. The last one that a request may emit is a bonus."""
        room = max(request.limit - request.known - 1, 0)
        is_tree = self._runner.method.drafter.draft_depth < self._runner.method.drafter.draft_length
        return drafts if is_tree and room else min(drafts, room)

    def _log_probs(self, request: Request, lane: int, report: Report, ids: list[int]) -> list[TokenLogProb]:
        assert report.log_probs is not None and request.settings.log_probs is not None
        rows = report.log_probs
        count = request.settings.log_probs
        return [
            TokenLogProb(
                token_id=token,
                log_prob=float(rows.chosen[lane, i]),
                top=tuple((int(rows.top_ids[lane, i, k]), float(rows.top[lane, i, k])) for k in range(count)),
            )
            for i, token in enumerate(ids)
        ]


def _rank(request: Request) -> tuple[int, int]:
    """Lower ones come first."""
    return -request.priority, request.index


def _failed_by_grammar(request: Request) -> bool:
    return request.constraint is not None and request.constraint.failure is not None
