"""Where the time of a round goes."""

import dataclasses
import time
from typing import Any

import jax


@dataclasses.dataclass(kw_only=True)
class Timings:
    """Seconds spent per part of the rounds. Filling it waits for each program, so it costs overlap."""

    draft: float = 0.0
    target: float = 0.0
    settle: float = 0.0
    host: float = 0.0  # between the rounds: text, stops, bookkeeping, choosing the next bucket
    rounds: int = 0
    last_end: float | None = None  # of the round before, while a request runs

    @property
    def total(self) -> float:
        """Seconds of all decode rounds."""
        return self.draft + self.target + self.settle + self.host

    @property
    def shares(self) -> dict[str, float]:
        """Fractions of the total by part; "rest" is settling and the host's work."""
        total = self.total or 1.0
        rest = self.settle + self.host
        return {"draft": self.draft / total, "target": self.target / total, "rest": rest / total}


class Stopwatch:
    """Times the parts of one round into a `Timings`, or does nothing."""

    def __init__(self, timings: Timings | None):
        self._timings = timings
        self._laps: dict[str, float] = {}
        self._last = time.perf_counter()
        if timings is not None and timings.last_end is not None:
            self._laps["host"] = self._last - timings.last_end

    def lap(self, name: str, value: Any) -> Any:
        """Waits for `value` if timings are kept, and books the time since the last lap."""
        if self._timings is not None:
            jax.block_until_ready(value)
            now = time.perf_counter()
            self._laps[name] = now - self._last
            self._last = now
        return value

    def finish(self, *, counted: bool) -> None:
        """Adds the laps, unless the round was a prefill."""
        if self._timings is None:
            return
        self._timings.last_end = self._last if counted else None
        if counted:
            for name, seconds in self._laps.items():
                setattr(self._timings, name, getattr(self._timings, name) + seconds)
            self._timings.rounds += 1
