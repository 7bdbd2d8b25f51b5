"""A client's call while it is answered: requests of the engine, and what arrives of them."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable, Sequence

from jspec.request import Request
from jspec.results import Piece, Result
from jspec_serve.problem import Problem


@dataclasses.dataclass(frozen=True, kw_only=True)
class Times:
    """When what happened to a request, in seconds of time.perf_counter()."""

    submitted: float
    started: float  # it got its slot
    first_token: float
    finished: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Update:
    """What one round added to one of a call's requests."""

    choice: int
    piece: Piece
    result: Result | None = None  # with the last piece
    times: Times | None = None  # with the last piece


class Call:
    """One or more requests of one client, answered together. It lives on the event loop that made it.

    Leaving its `async with` block cancels what has not ended.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        priority: int,
        client: str | None,
        cancel: Callable[["Call"], None],
    ):
        """
        Args:
          requests: from `Engine.prepare`; choice i is requests[i].
          priority: of all of them, see `Session.add`.
          client: likewise.
          cancel: told when nobody waits for the rest any more.
        """
        self.requests, self.priority, self.client = tuple(requests), priority, client
        self.submitted = time.perf_counter()
        self.loop = asyncio.get_running_loop()
        self.unfinished = len(self.requests)
        self._cancel = cancel
        self._arrived: asyncio.Queue[Update | Problem] = asyncio.Queue()

    def put(self, item: Update | Problem) -> None:
        """Takes what arrived; on the call's own loop."""
        self._arrived.put_nowait(item)

    async def updates(self) -> AsyncIterator[Update]:
        """Everything that arrives, until all requests have ended.

        Raises:
          Problem: the engine cannot go on.
        """
        while self.unfinished:
            item = await self._arrived.get()
            if isinstance(item, Problem):
                raise item
            if item.result is not None:
                self.unfinished -= 1
            yield item

    async def __aenter__(self) -> "Call":
        return self

    async def __aexit__(self, *_: object) -> None:
        if self.unfinished:
            self.unfinished = 0
            self._cancel(self)
