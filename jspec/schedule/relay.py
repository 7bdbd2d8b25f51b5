"""Confidence on its way to the host: two rounds late, and never waited for.

A budget may depend on anything that was known before its round's tokens were drawn. What is at least
two rounds old is, and its copy from the device is done without anybody waiting: the host asks
`is_ready()`, and if it is not, decides on what it has.
"""

import collections
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


class Relay:
    """The confidence of every slot, as old as it has to be, and whose request it belongs to.

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
        self._arriving: collections.deque[tuple[int, Sequence[int], np.ndarray, Arriving]] = (
            collections.deque()
        )
        self._confidence = np.zeros((num_slots, draft_length), np.float32)
        self._generations = np.zeros((num_slots,), np.int64)
        self._carried = [(self._confidence.copy(), self._generations.copy()) for _ in range(carry)]
        self._calls = 0

    def publish(
        self, round_: int, slots: Sequence[int], generations: np.ndarray, confidence: Arriving
    ) -> None:
        """Takes over a round's confidence.

        Args:
          round_: its number; rising.
          slots: of the first rows of `confidence`; rows behind them are padding.
          generations: of those slots' requests.
          confidence: float [at least len(slots), at most draft_length].
        """
        self._arriving.append((round_, tuple(slots), np.asarray(generations).copy(), confidence))

    def resolve(self, round_: int, slots: Sequence[int]) -> tuple[np.ndarray, np.ndarray] | None:
        """What may be known in round `round_`.

        Returns:
          Confidence float32 [slots, drafts] and the generations int64 [slots] that it belongs to, 0 for
          a slot that has none; None if nothing is old enough or the newest that is has not arrived.
        """
        due = round_ - self._lag
        if due < 0:
            return None
        while self._arriving and self._arriving[0][0] <= due:
            if not self._arriving[0][3].is_ready():
                return None
            _, published, generations, confidence = self._arriving.popleft()
            rows = np.asarray(confidence)[: len(published)]
            self._confidence[list(published), : rows.shape[1]] = rows
            self._generations[list(published)] = generations
        index = list(slots)
        result = self._confidence[index], self._generations[index]
        if self._carried:
            held, of = self._carried[self._calls % len(self._carried)]
            late = held[index], of[index]
            held[index], of[index] = result
            result = late
        self._calls += 1
        return result


def known_survival(
    confidence: np.ndarray, generations: np.ndarray, current: np.ndarray, unknown: np.ndarray | float = 1.0
) -> np.ndarray:
    """Survival of chains as the host knows it.

    Args:
      confidence: float [slots, drafts].
      generations: int [slots], of the requests that it belongs to.
      current: int [slots], of the requests that have the slots now.
      unknown: survival of a request that nothing is known of: by default all ones, so that it drafts.

    Returns:
      float32 [slots, drafts]; a confidence that is no probability counts as 1.
    """
    checked = np.where((confidence >= 0) & (confidence <= 1), confidence, np.float32(1))
    known = (generations == current) & (generations >= 1)
    return np.where(known[:, None], np.cumprod(checked, axis=1, dtype=np.float32), unknown).astype(np.float32)
