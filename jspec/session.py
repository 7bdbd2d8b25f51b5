"""Requests that come and go: added at any time, moved on by one round at a time."""

import collections
import time
from collections.abc import Callable, Sequence

from jspec.buckets import Bucket, Ladder
from jspec.cut import Finish
from jspec.decode import Report, Round
from jspec.flight import Flight
from jspec.grammar.overlap import GrammarOverlap
from jspec.intake import Intake
from jspec.planner import Planner
from jspec.prompts import Prompt
from jspec.request import Request
from jspec.results import Piece, Result
from jspec.runner import Runner
from jspec.schedule.scheduler import Scheduler
from jspec.settings import Settings
from jspec.timings import Timings
from jspec.told_log_probs import tell_prompt, told
from jspec.waiting import Waiting, patient, rank
from jspec.why_off import why_off

# Called after every round with its requests by lane (None = it left before the round was read, and nothing
# of its lane counts), its bucket, the round and the report.
Observer = Callable[[Sequence[Request | None], Bucket, Round, Report], None]


class Session:
    """One user's requests on an engine. Close it, or use it in a `with` statement, to free their slots.

    With overlap, a round is launched before the one before it is read, so that the device need not wait for
    the host. Requests end one round late then, as far as the device is concerned: a lane of the round in
    flight is inert, and counted. What they emit, and all else that is counted, is the same, but for two
    things: a schedule, which shares a budget among the requests of a round, may share it differently, and a
    drafter that had no token for some rounds goes without in the round where it has some again.

    A prompt is executed in chunks, one a round. Mixed, those that run decode in the same rounds; else they
    stand still until the prompt is done. One prompt is executed at a time in either case.

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
        overlap: bool,
        grammar_overlap: GrammarOverlap,
        mixed: bool,
        timings: Timings | None = None,
        observer: Observer | None = None,
    ):
        """See `jspec.engine.Engine.session`."""
        self._runner, self._intake, self._scheduled = runner, intake, scheduler is not None
        self._planner = Planner(
            runner=runner,
            ladder=ladder,
            scheduler=scheduler,
            timings=timings,
            grammar_overlap=grammar_overlap,
            mixed=mixed,
        )
        self._observer = observer
        self._most_flights = 2 if overlap and timings is None else 1
        self._flights: collections.deque[Flight] = collections.deque()  # launched and not read, oldest first
        self.inert_lanes = 0  # of rounds, whose requests had ended when they were read
        self._waiting = Waiting()
        self._running: dict[int, Request] = {}  # by slot
        self._requests: dict[int, Request] = {}  # by number, until they are forgotten
        self._next_index = 0

    def add(
        self,
        prompts: Prompt | Sequence[Prompt],
        settings: Settings | Sequence[Settings] | None = None,
        *,
        priority: int = 0,
        client: str | None = None,
    ) -> list[int]:
        """Puts requests at the end of the queue; see `Engine.generate` for prompts and settings.

        Args:
          prompts: one or several.
          settings: for all of them, or one each.
          priority: requests of a greater one are admitted first, and may have running ones of a lesser one
            put back into the queue, though not for ever.
          client: whose they are. Within a priority clients take turns, and the first request of a client to
            come is the first to be admitted; see `jspec.waiting.Waiting`.

        Returns:
          Their numbers, which pieces carry as `index`: 0, 1, 2, ... in the order in which they were added.

        Raises:
          ValueError: a prompt or a setting is unusable; none of them was added then.
        """
        return self.enqueue(self._intake.requests(prompts, settings), priority=priority, client=client)

    def enqueue(
        self, requests: Sequence[Request], *, priority: int = 0, client: str | None = None
    ) -> list[int]:
        """Puts requests that `Engine.prepare` made into the queue; see `add`.

        Returns:
          Their numbers, as `add` does.
        """
        for request in requests:
            request.index, request.priority, request.client = self._next_index, priority, client
            self._next_index += 1
            self._requests[request.index] = request
            self._waiting.add(request)
        return [request.index for request in requests]

    def cancel(self, index: int) -> None:
        """Ends that request, if it has not ended, and frees its slot; it gives no more pieces."""
        request = self._requests[index]
        if request.finish_reason is not None:
            return
        request.finish_reason = "cancelled"
        if self._running.get(request.slot) is request:
            self._leave(request)
        else:
            self._waiting.remove(request)
        self._waiting.charge(request)

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
        request, drafter = self._requests[index], self._runner.method.drafter
        return request.result(
            simulated=drafter.simulated,
            scheduled=self._scheduled,
            why_off=why_off(request, drafter),
        )

    def step(self, bucket: Bucket | None = None) -> list[Piece]:
        """Admits what fits, launches rounds, and returns what one round added.

        Args:
          bucket: of the next round if it decodes, to measure it; None = the one of most tokens per second,
            or without a schedule the one that holds every draft token. Only without overlap.

        Raises:
          ValueError: a bucket, with overlap.
          RuntimeError: nothing runs, and the first that waits finds no slot or no room in the cache.
        """
        if bucket is not None and self._most_flights > 1:
            raise ValueError(
                f"bucket: expected None in a session with overlap, whose rounds cannot be told apart, got {bucket}; "
                "open it with overlap=False"
            )
        if not self.busy:
            return []
        self._admit()
        if not self._running:
            first, prefixes = self._waiting.first, self._runner.prefixes
            raise RuntimeError(
                f"prompts[{first.index}]: expected a free slot and cache for {first.limit} tokens, got "
                f"{len(self._runner.free_slots)} slots and {prefixes.free_pages[0] * prefixes.pool.page_size} "
                "tokens; finish or close other streams"
            )
        while len(self._flights) < self._most_flights:
            flight = self._planner.launch(
                self._running.values(),
                bucket=bucket,
                prompt_waits=bool(self._flights and self._waiting),
            )
            if flight is None:
                break
            self._flights.append(flight)
            if flight.constrained and len(self._flights) > 1:
                # Its grammars have to be moved on by the round before it, before its masks can be filled.
                pieces = self._land(self._flights.popleft())
                if not flight.void:
                    self._runner.settle(flight.launched, flight.requests)
                return pieces
            self._runner.settle(flight.launched, flight.requests)
        return self._land(self._flights.popleft())

    def _admit(self) -> None:
        """Gives slots to those whose turn it is.

        A request comes in when the prompts before it are done, not earlier: only then does it find in the
        prefix cache what they have in common.
        """
        while self._waiting:
            request, prefilling = self._waiting.first, self._prefilling()
            if prefilling is not None and prefilling.priority >= request.priority:
                return
            if self._runner.admit(request):
                self._waiting.take_first()
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
        """The running request whose prompt is executed next, or is being executed."""
        return min((r for r in self._running.values() if r.prefilling), key=rank, default=None)

    def _victims(self, request: Request) -> list[Request]:
        """Running requests of lesser priority that have to go so that this one can come in; none if that
        does not help."""
        lesser = [r for r in self._running.values() if r.priority < request.priority and not patient(r)]
        lesser.sort(key=rank, reverse=True)
        for count in range(1, len(lesser) + 1):
            if self._runner.has_room(request, lesser[:count]):
                return lesser[:count]
        return []

    def preempt(self, index: int) -> None:
        """Takes a running request's slot and pages, and puts it back into the queue, at its old place.

        It goes on later with the text that it has, which is without what the round in flight does. What the
        prefix cache still has of it then is not executed again. A greedy request, or one with a seed, emits
        what it would have emitted.

        Raises:
          ValueError: it is not running.
        """
        request = next((r for r in self._running.values() if r.index == index), None)
        if request is None:
            raise ValueError(
                f"index: expected one of the running requests {sorted(r.index for r in self._running.values())}, "
                f"got {index}; a request that waits or has finished has no slot to give up"
            )
        self._leave(request)
        request.committed = request.ready = request.dry = 0
        request.preemptions += 1
        self._waiting.put_back(request)

    def _leave(self, request: Request) -> None:
        """Takes a running request's slot, and its lane of the round in flight."""
        del self._running[request.slot]
        for flight in self._flights:
            self.inert_lanes += flight.drop(request)
        if self._flights and self._flights[-1].void:
            self._flights.pop()
        self._runner.leave(request)

    def _land(self, flight: Flight) -> list[Piece]:
        """Reads a round, and books what it did."""
        bucket, launched = flight.bucket, flight.launched
        report = launched.read()
        self._planner.learn(flight)
        if self._observer is not None:
            self._observer(flight.requests, bucket, launched.round, report)
        pieces = []
        for lane, request in enumerate(flight.requests):
            if request is None:
                continue
            request.executing -= launched.certain[lane]
            piece = self._take(request, lane, report, flight)
            if report.finish[lane] == Finish.BROKEN:
                self._runner.distrust(request)
            else:
                self._runner.publish(request)
            if request.finish_reason is not None:
                self._leave(request)
                self._waiting.charge(request)
            if piece is not None:
                pieces.append(piece)
        return pieces

    def close(self) -> None:
        """Frees the slots of what still runs, and forgets what waits."""
        self._waiting.clear()
        self._flights.clear()
        for request in list(self._running.values()):
            self._leave(request)

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _take(self, request: Request, lane: int, report: Report, flight: Flight) -> Piece | None:
        """Books one request's lane of a round; None if it has nothing to say to its caller."""
        was_prefilling = request.prefilling
        committed = int(report.committed[lane])
        if request.settings.prompt_log_probs and was_prefilling:
            tell_prompt(request, report.prompt_log_probs, lane, committed)
        request.committed += committed
        text, ids = _emitted(request, lane, report)
        drafted = [i < int(report.accepted[lane]) for i in range(len(ids))]
        if not was_prefilling:
            # A stop string cuts the counts as a stop token does on the device: one committed node per token.
            request.count(
                proposed=int(report.proposed[lane]),
                verified=int(report.verified[lane]),
                accepted=sum(drafted),
                committed=min(committed, len(ids)),
                budget=flight.budget,
                unusable=int(report.unusable[lane]),
                declined=flight.declined,
                depth=self._runner.method.drafter.draft_depth,
            )
        request.token_ids.extend(ids)
        request.ready = int(report.ready[lane])
        request.dry = 0 if request.ready else request.dry + 1
        tells_prompt = request.settings.prompt_log_probs and len(request.token_ids) == len(ids)
        log_probs = None
        if request.settings.log_probs is not None:
            log_probs = tuple(told(request, report.log_probs, lane, i, token) for i, token in enumerate(ids))
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
            prompt_log_probs=tuple(request.prompt_log_probs) if tells_prompt else None,
            finish_reason=request.finish_reason,
            reused=request.reused,
        )


def _emitted(request: Request, lane: int, report: Report) -> tuple[str, list[int]]:
    """Text and tokens of a round as far as the request's end, whose reason it notes."""
    ids = [int(t) for t in report.tokens[lane, : int(report.emitted[lane])]]
    finish, constraint = Finish(int(report.finish[lane])), request.constraint
    if finish is Finish.BROKEN:
        request.finish_reason = "error: the target's logits are NaN, or its settings allow no token"
    elif finish is not Finish.RUNNING:
        request.finish_reason = finish.name.lower()
    if constraint is not None and ids:
        if (last := constraint.advance(ids)) is not None:
            ids = ids[: last + 1]
            request.finish_reason = "stop"
        elif constraint.failure is not None:
            request.finish_reason = f"error: {constraint.failure}"
    text, stopped_at = request.output.push(ids, last=request.finish_reason is not None)
    if stopped_at is not None:
        ids = ids[: stopped_at + 1]
        request.finish_reason = "stop"
    return text, ids
