"""What drafts were worth lately, request by request: the best guess at what the next ones will be."""

from collections.abc import Sequence

import numpy as np

from jspec.schedule.relay import Known, with_unknown


class History:
    """The last rows of survival of every slot.

    One row, two rounds old, says little about the draft tokens of the next round, which are others. Many
    rows say how survival is spread, and so what a budget would buy: an expectation over them.
    """

    DEPTH = 16  # rows of each slot

    def __init__(self, num_slots: int, draft_length: int, *, typical: np.ndarray | None = None):
        """
        Args:
          num_slots: of the engine.
          draft_length: draft tokens.
          typical: mean survival by position as measured elsewhere; None = all ones until something is known.
        """
        self._rows = np.zeros((num_slots, self.DEPTH, draft_length), np.float32)
        self._counts = np.zeros((num_slots,), np.int64)  # rows ever added for the slot's request
        self._generations = np.zeros((num_slots,), np.int64)
        self._rounds = np.full((num_slots,), -1, np.int64)
        self._typical = np.ones((draft_length,), np.float32) if typical is None else np.asarray(typical)
        self._seen = 0 if typical is None else self.DEPTH  # rounds behind `typical`

    def add(self, slots: Sequence[int], known: Known) -> None:
        """Takes in what is new in `known`, whose rows belong to these slots."""
        index = np.asarray(slots)
        new = (known.rounds > self._rounds[index]) & (known.generations >= 1)
        if not new.any():
            return
        index, rows, generations = index[new], known.rows[new], known.generations[new]
        self._counts[index] = np.where(self._generations[index] == generations, self._counts[index], 0)
        self._generations[index], self._rounds[index] = generations, known.rounds[new]
        self._rows[index, self._counts[index] % self.DEPTH] = rows
        self._counts[index] += 1
        self._seen += 1
        weight = max(1 / self._seen, 1 / (2 * self.DEPTH))
        self._typical = self._typical + np.float32(weight) * (rows.mean(axis=0) - self._typical)

    def samples(self, slots: Sequence[int], current: Sequence[int]) -> np.ndarray:
        """Survival float32 [samples, slots, drafts]: each request's own rows, filled up with typical ones.

        Args:
          slots: of the lanes.
          current: generations of their requests.
        """
        index = np.asarray(slots)
        missing = np.arange(self.DEPTH)[None, :] >= self._counts[index, None]
        rows = np.where(missing[:, :, None], self._typical, self._rows[index]).reshape(len(index), -1)
        unknown = np.tile(self._typical, self.DEPTH)
        rows = with_unknown(rows, self._generations[index], np.asarray(current), unknown)
        return rows.reshape(len(index), self.DEPTH, -1).transpose(1, 0, 2)
