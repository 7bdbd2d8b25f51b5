"""A round between its launch and the moment its report is read."""

import dataclasses

from jspec.buckets import Bucket
from jspec.request import Request
from jspec.runner import Launched
from jspec.schedule.scheduler import Decision


@dataclasses.dataclass(kw_only=True)
class Flight:
    """A launched round and the requests in its lanes, some of which may leave before it is read.

    What the round then says of their lanes is void, and what it does to their slots is overwritten by the
    next requests there, or never looked at.
    """

    bucket: Bucket
    requests: list[Request | None]  # by lane, that of a prompt's chunk last; None = it has left since
    launched: Launched
    decision: Decision | None  # of the schedule, if there is one

    def drop(self, request: Request) -> bool:
        """Makes the request's lane void; False if it has none. That lane-round is inert."""
        for lane, other in enumerate(self.requests):
            if other is request:
                self.requests[lane] = None
                request.inert += 1
                request.executing -= self.launched.certain[lane]
                return True
        return False

    @property
    def constrained(self) -> bool:
        """Whether a request in it has a grammar."""
        return any(request is not None and request.constraint is not None for request in self.requests)

    @property
    def budget(self) -> float:
        """Each decoding request's part of the draft tokens that a schedule has given room to; 0 without one."""
        if self.decision is None or not self.bucket.budget:
            return 0.0
        return (self.bucket.nodes - len(self.requests)) / len(self.decision.lanes.slots)

    @property
    def declined(self) -> str | None:
        """Why the schedule did not draft; None if it did, or nothing was there."""
        return None if self.decision is None else self.decision.declined

    @property
    def void(self) -> bool:
        """Whether nobody is left in it."""
        return not any(self.requests)
