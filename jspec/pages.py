"""Which pages belong to whom: a free list per layer group, reserved whole before a request starts."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from jspec.cache import GroupLayout


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reservation:
    """The pages of one request in every group."""

    pages: tuple[tuple[int, ...], ...]


class PagePool:
    """Free pages of every layer group of a cache.

    A request gets all the pages that it can ever need when it is admitted, so a running one never
    waits for memory. A window group needs only as many as hold the window and one round's commits;
    its table row repeats them as a ring.
    """

    def __init__(
        self,
        layouts: tuple[GroupLayout, ...],
        *,
        page_size: int,
        max_context: int,
        max_commit: int,
        max_slots: int,
        total_tokens: int | None = None,
        rings: bool = True,
    ):
        """
        Args:
          layouts: of the cache's groups.
          page_size: tokens per page.
          max_context: tokens that one request may hold.
          max_slots: requests that run together.
          max_commit: most tokens that one round commits to a slot.
          total_tokens: tokens that fit in the full-context groups; None = max_slots x max_context.
          rings: False = window groups, too, keep the whole context, so that their pages can be shared.
        """
        self.page_size = page_size
        self.columns = -(-max_context // page_size)
        whole = max_slots * self.columns if total_tokens is None else -(-total_tokens // page_size)
        self._rings = tuple(
            self.columns if layout.window is None or not rings else self._ring(layout.window, max_commit)
            for layout in layouts
        )
        self.num_pages = tuple(
            whole if layout.window is None or not rings else max_slots * ring
            for layout, ring in zip(layouts, self._rings, strict=True)
        )
        self._free = [list(range(count)) for count in self.num_pages]

    def _ring(self, window: int, max_commit: int) -> int:
        # Two tokens of one commit must not meet on a row, nor a new token meet one still in sight.
        return min(-(-max(window, max_commit) // self.page_size), self.columns)

    def needed(self, tokens: int) -> tuple[int, ...]:
        """Pages per group for a request whose text never exceeds `tokens`."""
        return tuple(min(-(-tokens // self.page_size), ring) for ring in self._rings)

    def can_ever_hold(self, tokens: int) -> bool:
        """Whether an empty pool could hold such a request."""
        return all(need <= have for need, have in zip(self.needed(tokens), self.num_pages, strict=True))

    @property
    def keeps_whole_context(self) -> bool:
        """Whether every page of a request holds the same tokens for as long as it runs, in every group."""
        return all(ring == self.columns for ring in self._rings)

    def reserve(self, tokens: int) -> Reservation | None:
        """Takes the pages, or None if some group has too few free ones now."""
        pages = self.take(self.needed(tokens))
        return None if pages is None else Reservation(pages=pages)

    def release(self, reservation: Reservation) -> None:
        """Gives the pages back."""
        self.give_back(reservation.pages)

    def take(self, counts: tuple[int, ...]) -> tuple[tuple[int, ...], ...] | None:
        """So many pages of each group, or None if some group has too few free ones now."""
        if any(count > len(free) for count, free in zip(counts, self._free, strict=True)):
            return None
        return tuple(
            tuple(free.pop() for _ in range(count)) for count, free in zip(counts, self._free, strict=True)
        )

    def give_back(self, pages: Sequence[Sequence[int]]) -> None:
        """Frees pages of each group."""
        for free, more in zip(self._free, pages, strict=True):
            free.extend(more)

    def table_rows(self, reservation: Reservation) -> tuple[np.ndarray, ...]:
        """Page table row of each group: the pages in order, repeated along the row."""
        return tuple(np.resize(np.asarray(pages, np.int32), self.columns) for pages in reservation.pages)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Free pages per group."""
        return tuple(len(free) for free in self._free)
