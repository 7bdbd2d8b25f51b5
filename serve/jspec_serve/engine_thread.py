"""The thread that owns an engine: calls go in at any time, and after each round out comes what it added."""

import asyncio
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Sequence

from jspec.buckets import Bucket
from jspec.decode import Report, Round
from jspec.engine import Engine
from jspec.request import Request
from jspec.results import Piece
from jspec.session import Session
from jspec.timings import Timings
from jspec_serve.calls import Call, Times, Update
from jspec_serve.metrics import Metrics
from jspec_serve.problem import Problem, engine_failed, grammar_failed, shutting_down

log = logging.getLogger(__name__)

# Weight of the newest request in the mean time that requests take, from which Retry-After is guessed.
NEWEST = 0.1


@dataclasses.dataclass(kw_only=True)
class _Choice:
    """One request of a call inside the thread."""

    call: Call
    number: int
    first_token: float | None = None


class EngineThread:
    """Runs rounds while there are requests, and sleeps while there are none.

    Everything but `start`'s thread only puts commands into a queue, which is emptied before each round:
    a call that is cancelled has lost its slots when the next round starts. With overlap one round is on its
    way while what came of the one before is handed over. If a round fails, all calls and all later ones get
    that failure; none waits for ever.
    """

    def __init__(self, engine: Engine, *, max_waiting: int, metrics: Metrics, timings: Timings | None = None):
        """Starts nothing yet.

        Args:
          engine: nobody else may use it from `start` to `stop`, except for `prepare`.
          max_waiting: requests that may wait for a slot.
          metrics: told of every round and request.
          timings: filled if given, which costs overlap.
        """
        self.engine, self.metrics = engine, metrics
        self.max_waiting = max_waiting
        self.failure: Problem | None = None
        self.rounds = 0
        self._timings = timings
        self._commands: queue.SimpleQueue[tuple[str, Call | None]] = queue.SimpleQueue()
        self._lock = threading.Lock()  # of `failure` and `unfinished`, and of what goes into the queue
        self._closed = False
        self.unfinished = 0
        self.running = 0
        self._mean_seconds = 1.0
        self._choices: dict[int, _Choice] = {}  # by the session's number; the thread's own
        self._observed: tuple[Bucket, int] | None = None  # of the last round
        self._inert_lanes = 0  # that the metrics know of
        self._thread = threading.Thread(target=self._run, name="jspec-engine", daemon=True)

    # -- for the event loop -------------------------------------------------------------------

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after its round; what is unfinished fails. Blocks until then."""
        self._closed = True
        self._commands.put(("stop", None))
        if self._thread.is_alive():
            self._thread.join()

    def drain(self) -> None:
        """Refuses new calls from now on; those that there are go on. Signal handlers may call it: no lock."""
        self._closed = True

    @property
    def draining(self) -> bool:
        """Whether new calls are refused."""
        return self._closed

    @property
    def waiting(self) -> int:
        """Requests without a slot."""
        return max(self.unfinished - self.running, 0)

    @property
    def capacity(self) -> int:
        """Requests that may run and wait together."""
        return self.engine.max_slots + self.max_waiting

    def submit(self, requests: Sequence[Request], *, priority: int = 0, client: str | None = None) -> Call:
        """Hands requests of one client to the engine; all of them or none.

        Args:
          requests: from `Engine.prepare`.
          priority: of all of them, see `Session.add`.
          client: likewise.

        Raises:
          Problem: 429 if too many wait, 503 when draining, 500 if the engine has failed.
        """
        with self._lock:
            if self.failure is not None:
                raise self.failure.with_traceback(None)  # else it would hold every request that met it
            if self._closed:
                raise shutting_down()
            if self.unfinished + len(requests) > self.capacity:
                raise self._full(len(requests))
            self.unfinished += len(requests)
            call = Call(requests, priority, client, self.cancel)
            self._commands.put(("add", call))
        return call

    def cancel(self, call: Call) -> None:
        """Frees the slots of a call that nobody waits for any more, before the next round."""
        self._commands.put(("cancel", call))

    def _full(self, count: int) -> Problem:
        if count > self.capacity:
            return Problem(
                400,
                f"n: expected at most {self.capacity} answers a call, which is all that this server holds, got "
                f"{count}; ask for fewer at a time",
                param="n",
            )
        seconds = self._mean_seconds * max(self.waiting, 1) / self.engine.max_slots
        return Problem(
            429,
            f"{self.waiting} requests wait already, and at most {self.max_waiting} may; try again later",
            kind="rate_limit_error",
            code="queue_full",
            retry_after=min(max(math.ceil(seconds), 1), 60),
        )

    # -- the thread ---------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with self.engine.session(timings=self._timings, observer=self._observe) as session:
                while self._take_commands(session):
                    self._round(session)
            self._fail(shutting_down())
        except BaseException as problem:  # whatever it is, those who wait must hear of it
            log.exception("the engine failed")
            self._fail(engine_failed(f"the engine failed: {type(problem).__name__}; see the server's log"))

    def _take_commands(self, session: Session) -> bool:
        """Carries out what was asked; waits while nothing runs. False = stop."""
        while True:
            try:
                kind, call = self._commands.get(block=not session.busy)
            except queue.Empty:
                return True
            if call is None:
                return False
            if kind == "add":
                indices = session.enqueue(call.requests, priority=call.priority, client=call.client)
                for number, index in enumerate(indices):
                    self._choices[index] = _Choice(call=call, number=number)
            else:
                for request in call.requests:
                    if self._choices.pop(request.index, None) is not None:
                        session.cancel(request.index)
                        session.forget(request.index)
                        self._left(1, session)
                        self.metrics.ended("cancelled")

    def _left(self, count: int, session: Session) -> None:
        with self._lock:
            self.unfinished -= count
        self.running = session.num_running

    def _observe(self, requests: Sequence[Request | None], bucket: Bucket, _: Round, report: Report) -> None:
        self._observed = bucket, len(requests)

    def _round(self, session: Session) -> None:
        before = time.perf_counter()
        pieces = session.step()
        now = time.perf_counter()
        self.rounds += 1
        if self._observed is not None:
            bucket, lanes = self._observed
            self.metrics.round(bucket, lanes=lanes, seconds=now - before)
        self.metrics.inert(session.inert_lanes - self._inert_lanes)
        self._inert_lanes = session.inert_lanes
        if self._timings is not None:
            self.metrics.parts(self._timings)
        self.running = session.num_running
        arrived: dict[asyncio.AbstractEventLoop, list[tuple[Call, Update | Problem]]] = {}
        for piece in pieces:
            choice = self._choices[piece.index]
            update = self._update(session, choice, piece, now)
            arrived.setdefault(choice.call.loop, []).append((choice.call, update))
        for loop, items in arrived.items():
            _hand_over(loop, items)

    def _update(self, session: Session, choice: _Choice, piece: Piece, now: float) -> Update | Problem:
        self.metrics.piece(piece)
        if choice.first_token is None:
            choice.first_token = now
        if piece.finish_reason is None:
            return Update(choice=choice.number, piece=piece)
        request = choice.call.requests[choice.number]
        result = session.result(piece.index)
        session.forget(piece.index)
        del self._choices[piece.index]
        self._left(1, session)
        assert request.started is not None
        times = Times(
            submitted=choice.call.submitted,
            started=request.started,
            first_token=choice.first_token,
            finished=now,
        )
        self._mean_seconds += NEWEST * (now - request.started - self._mean_seconds)
        if result.finish_reason.startswith("error"):
            self.metrics.ended("error")
            if request.grammar_failed:
                return grammar_failed(result.finish_reason)
            return engine_failed(result.finish_reason)
        self.metrics.ended(result.finish_reason)
        self.metrics.request(result, times)
        return Update(choice=choice.number, piece=piece, result=result, times=times)

    def _fail(self, problem: Problem) -> None:
        with self._lock:
            self.failure = problem
        calls = [choice.call for choice in self._choices.values()]
        self._choices.clear()
        while True:
            try:
                kind, call = self._commands.get_nowait()
            except queue.Empty:
                break
            if kind == "add" and call is not None:
                calls.append(call)
        self.unfinished = self.running = 0
        for call in {id(call): call for call in calls}.values():
            _hand_over(call.loop, [(call, problem)])


def _hand_over(loop: asyncio.AbstractEventLoop, items: list[tuple[Call, Update | Problem]]) -> None:
    def put() -> None:
        for call, item in items:
            call.put(item)

    try:
        loop.call_soon_threadsafe(put)
    except RuntimeError:
        # The loop is gone, and with it everybody who waited there.
        if not loop.is_closed():
            raise
