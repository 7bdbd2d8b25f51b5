"""What a server counts, for Prometheus."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from jspec.buckets import Bucket
from jspec.engine import Engine
from jspec.results import Piece, Result
from jspec.timings import Timings
from jspec_serve.calls import Times

LATENCIES = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256)
PARTS = ("draft", "target", "settle", "host")
NEWEST = 0.02  # weight of the newest round of a request in the moving mean commit length


class Metrics:
    """Counters, gauges and histograms of one server, in a registry of its own.

    All but the gauges are changed by the engine's thread; HTTP's counter by the event loop.
    """

    def __init__(self) -> None:
        """Everything at 0."""
        self.registry = CollectorRegistry()
        self._responses = self._counter("responses", "HTTP responses", "path", "status")
        self._ended = self._counter("requests", "Requests that ended", "reason")
        self._prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of answered requests")
        self._reused = self._counter(
            "reused_prompt_tokens", "Of those, tokens that the prefix cache had, and so were not executed"
        )
        self._preemptions = self._counter("preemptions", "Requests put back for others of greater priority")
        self._generated = self._counter("generated_tokens", "Tokens emitted")
        self._rounds = self._counter("rounds", "Rounds by kind", "kind")
        self._lane_rounds = self._counter("lane_rounds", "Decode rounds, counted once for each request in it")
        self._drafting = self._counter("drafting_lane_rounds", "Those in which a draft token was verified")
        self._committed = self._counter("committed_nodes", "Target nodes committed in decode rounds")
        self._drafts = self._counter("draft_tokens", "Draft tokens by what became of them", "stage")
        self._position = self._counter(
            "accepted_at_position", "Lane-rounds that accepted a draft token at this position", "position"
        )
        self._inert = self._counter(
            "inert_lane_rounds",
            "Lanes of rounds launched for requests that ended before; the price of overlap",
        )
        self._parts = self._counter("round_part_seconds", "Seconds of decode rounds, if measured", "part")
        self._first = self._seconds("time_to_first_token", "From the call to its first token")
        self._each = self._seconds("time_per_output_token", "Mean time of a request's later tokens")
        self._whole = self._seconds("request", "From the call to its last token")
        self._queue = self._seconds("queue", "From the call to its slot")
        self._round = self._seconds("round", "Of one round, the host's work included", "kind")
        self._batch = self._sizes("batch_lanes", "Requests in a decode round")
        self._budget = self._sizes("round_budget", "Draft tokens that a decode round had room to verify")
        self._verify = self._sizes("verify_length", "Draft tokens verified of a request in a decode round")
        self._mean_commit = Gauge(
            "jspec_mean_commit_length",
            "Committed nodes of a request's decode round, moving mean",
            registry=self.registry,
        )
        self._mean: float | None = None
        self._timed = Timings()

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(f"jspec_{name}", text, labels, registry=self.registry)

    def _seconds(self, name: str, text: str, *labels: str) -> Histogram:
        return Histogram(f"jspec_{name}_seconds", text, labels, buckets=LATENCIES, registry=self.registry)

    def _sizes(self, name: str, text: str) -> Histogram:
        return Histogram(f"jspec_{name}", text, buckets=COUNTS, registry=self.registry)

    def watch(self, engine: Engine, *, waiting: Callable[[], int], running: Callable[[], int]) -> None:
        """Adds gauges that are read when they are asked for."""

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(f"jspec_{name}", text, registry=self.registry).set_function(value)

        gauge("waiting", "Requests without a slot", waiting)
        gauge("running", "Requests with a slot", running)
        gauge("slots", "Slots", lambda: engine.max_slots)
        programs = engine.programs
        gauge("compiled_programs", "Programs traced and compiled", lambda: sum(programs.traces.values()))
        pages = Gauge("jspec_pages", "Cache pages", ("group",), registry=self.registry)
        free = Gauge(
            "jspec_free_pages",
            "Cache pages that requests could get now, those of the prefix cache included",
            ("group",),
            registry=self.registry,
        )
        for group, count in enumerate(engine.num_pages):
            pages.labels(str(group)).set(count)
            free.labels(str(group)).set_function(lambda group=group: engine.free_pages[group])

    def response(self, path: str, status: int) -> None:
        """Counts an HTTP response; `path` is a route, never what a client made up."""
        self._responses.labels(path, str(status)).inc()

    def ended(self, reason: str) -> None:
        """Counts a request: "stop", "length", "error" or "cancelled"."""
        self._ended.labels(reason).inc()

    def round(self, bucket: Bucket, *, lanes: int, seconds: float) -> None:
        """Books one round of `lanes` requests; with overlap, the time since the one before was read.

        A mixed round is a decode round whose last lane executes a prompt's chunk.
        """
        mixed = bucket.chunk > 0 and lanes > 1
        kind = "mixed" if mixed else "prefill" if bucket.chunk else "draft" if bucket.budget else "plain"
        self._rounds.labels(kind).inc()
        self._round.labels(kind).observe(seconds)
        if kind != "prefill":
            self._batch.observe(lanes - mixed)
            self._budget.observe(bucket.nodes - lanes if bucket.budget else 0)

    def inert(self, lanes: int) -> None:
        """Books lanes of rounds that came to nothing."""
        self._inert.inc(lanes)

    def parts(self, timings: Timings) -> None:
        """Books what was added to `timings` since the last call."""
        for part in PARTS:
            total, before = getattr(timings, part), getattr(self._timed, part)
            self._parts.labels(part).inc(total - before)
            setattr(self._timed, part, total)

    def piece(self, piece: Piece) -> None:
        """Books what a round added to a request."""
        self._generated.inc(len(piece.token_ids))
        if piece.verified is None:
            return
        accepted = sum(piece.drafted)
        self._lane_rounds.inc()
        self._committed.inc(len(piece.token_ids))
        self._verify.observe(piece.verified)
        self._drafts.labels("proposed").inc(piece.proposed)
        self._mean = (
            float(len(piece.token_ids))
            if self._mean is None
            else self._mean + NEWEST * (len(piece.token_ids) - self._mean)
        )
        self._mean_commit.set(self._mean)
        if piece.verified:
            self._drafting.inc()
            self._drafts.labels("verified").inc(piece.verified)
            self._drafts.labels("accepted").inc(accepted)
            for position in range(1, accepted + 1):
                self._position.labels(str(position)).inc()

    def request(self, result: Result, times: Times) -> None:
        """Books a request that was answered."""
        self._prompt_tokens.inc(len(result.prompt_ids))
        self._reused.inc(result.counters.reused)
        self._preemptions.inc(result.counters.preemptions)
        self._queue.observe(times.started - times.submitted)
        self._first.observe(times.first_token - times.submitted)
        self._whole.observe(times.finished - times.submitted)
        if len(result.token_ids) > 1:
            self._each.observe((times.finished - times.first_token) / (len(result.token_ids) - 1))

    def text(self) -> bytes:
        """All of it in Prometheus' text format."""
        return generate_latest(self.registry)
