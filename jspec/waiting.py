"""Who gets the next free slot: priorities, and fairness beside them."""

import bisect
from collections.abc import Iterator

from jspec.request import Request

# Requests of greater priority that may overtake one before it is next, whatever its priority is.
PATIENCE = 64


class Waiting:
    """Requests without a slot, in the order in which they get one.

    Greater priority goes first. Within one, clients take turns by the tokens that their requests may hold,
    and the requests of one client keep their order; so a client with many requests delays another's only
    request by one turn. Nobody starves: a request that `PATIENCE` later ones of greater priority have
    overtaken goes before all others, and is not interrupted.

    Source: turns are start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996), but time goes on by what
    is served, too, as in weighted fair queueing: nobody knows how many clients will come.
    """

    def __init__(self) -> None:
        """Nobody waits."""
        self._requests: list[Request] = []
        self._now = 0.0  # the turn of a client that comes anew
        self._following: dict[str | None, float] = {}  # a client's next turn, if that is later than now

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    @property
    def first(self) -> Request:
        """The next one that gets a slot."""
        return self._requests[0]

    def add(self, request: Request) -> None:
        """Takes in a new request; its index, priority and client are set."""
        request.turn = max(self._now, self._following.get(request.client, 0))
        self._following[request.client] = request.turn + request.limit
        self.put_back(request)

    def put_back(self, request: Request) -> None:
        """Takes in a request that had a slot, at its old place."""
        bisect.insort(self._requests, request, key=rank)

    def take_first(self) -> Request:
        """Removes the first one, which gets a slot."""
        first = self._requests.pop(0)
        self._now = max(self._now, first.turn)
        self._following = {client: turn for client, turn in self._following.items() if turn > self._now}
        overtaken = [o for o in self._requests if o.priority < first.priority and o.index < first.index]
        for other in overtaken:
            other.overtaken += 1
        if any(other.overtaken == PATIENCE for other in overtaken):
            self._requests.sort(key=rank)
        return first

    def remove(self, request: Request) -> None:
        """Removes one that has been cancelled."""
        self._requests = [other for other in self._requests if other is not request]

    def charge(self, request: Request) -> None:
        """Charges a client with the tokens that an ended request had, and not with those that it might have had.

        Time goes on by them, shared by the clients that wait: if it stood still where the last turn was, those
        that come anew without end would all go before one that has had a turn.
        """
        had = request.known if request.started is not None else 0
        if request.client in self._following:
            self._following[request.client] -= request.limit - had
        self._now += had / len({request.client, *(other.client for other in self._requests)})

    def clear(self) -> None:
        """Forgets all of them."""
        self._requests.clear()


def patient(request: Request) -> bool:
    """Whether it has been overtaken often enough."""
    return request.overtaken >= PATIENCE


def rank(request: Request) -> tuple[bool, int, float, int]:
    """Lower ones come first."""
    return not patient(request), -request.priority, request.turn, request.index
