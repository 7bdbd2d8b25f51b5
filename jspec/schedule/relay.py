"""Confidence, or the survival that comes of it, on its way to the host: two rounds late, never waited for.

A budget may depend on anything that was known before its round's tokens were drawn. What is at least
two rounds old is, and its copy from the device is done without anybody waiting: the host asks
`is_ready()`, and if it is not, decides on what it has.
"""

import collections
import dataclasses
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np


@runtime_checkable
class Arriving(Protocol):
    """An array on its way to the host, such as a `jax.Array` after `copy_to_host_async`."""

    def is_ready(self) -> bool:
        """Whether reading it would not wait."""
        ...

    def __array__(self) -> np.ndarray: ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Known:
    """What the host knows of some slots."""

    rows: np.ndarray  # float32 [slots, drafts]
    generations: np.ndarray  # int64 [slots], of the requests that the rows belong to; 0 = none
    rounds: np.ndarray  # int64 [slots], in which the rows were published; -1 = none


class Relay:
    """The latest row of every slot, as old as it has to be, and whose request it belongs to.

    Requests are told apart by their generation: how many requests the slot has had, counted from 1.
    """

    def __init__(self, num_slots: int, draft_length: int, *, lag: int = 2, carry: int = 0):
        """
        Args:
          num_slots: rows.
          draft_length: columns.
          lag: rounds between a confidence and the first budget that may use it.
          carry: further calls of `resolve` by which what it returns is late.
        """
        self._lag = lag
        self._arriving: collections.deque[tuple[int, list[int], np.ndarray, Arriving]] = collections.deque()

        def nothing() -> Known:
            return Known(
                rows=np.zeros((num_slots, draft_length), np.float32),
                generations=np.zeros((num_slots,), np.int64),
                rounds=np.full((num_slots,), -1, np.int64),
            )

        self._latest = nothing()
        self._carried = [nothing() for _ in range(carry)]
        self._calls = 0

    def publish(self, round_: int, slots: Sequence[int], generations: np.ndarray, rows: Arriving) -> None:
        """Takes over a round's rows.

        Args:
          round_: its number; rising.
          slots: of the first `rows`; what is behind them is padding.
          generations: of those slots' requests; 0 = the request has left, and its row says nothing.
          rows: float [at least len(slots), draft_length].
        """
        self._arriving.append((round_, list(slots), np.asarray(generations).copy(), rows))

    def resolve(self, round_: int, slots: Sequence[int]) -> Known | None:
        """What may be known in a round; None if nothing is old enough, or the newest has not arrived."""
        due = round_ - self._lag
        if due < 0:
            return None
        while self._arriving and self._arriving[0][0] <= due:
            if not self._arriving[0][3].is_ready():
                return None
            published, of, generations, rows = self._arriving.popleft()
            arrived = np.asarray(rows)[: len(of)]
            self._latest.rows[of] = arrived
            self._latest.generations[of] = generations
            self._latest.rounds[of] = published
        index = list(slots)
        result = _of_slots(self._latest, index)
        if self._carried:
            held = self._carried[self._calls % len(self._carried)]
            late = _of_slots(held, index)
            held.rows[index], held.generations[index] = result.rows, result.generations
            held.rounds[index] = result.rounds
            result = late
        self._calls += 1
        return result


def _of_slots(known: Known, index: list[int]) -> Known:
    return Known(rows=known.rows[index], generations=known.generations[index], rounds=known.rounds[index])


def with_unknown(
    survival: np.ndarray, generations: np.ndarray, current: np.ndarray, unknown: np.ndarray | float = 1.0
) -> np.ndarray:
    """Survival where it belongs to the request that has the slot now, and a guess elsewhere.

    Args:
      survival: float [slots, drafts] as relayed.
      generations: int [slots], of the requests that it belongs to; 0 = none.
      current: int [slots], of the requests that have the slots now.
      unknown: of a request that nothing is known of: by default all ones, so that it is tried.

    Returns:
      float32 [slots, drafts].
    """
    known = (generations == current) & (generations >= 1)
    return np.where(known[:, None], survival, unknown).astype(np.float32)
