"""The host's side of scheduled verification: which bucket the next round runs in."""

import dataclasses

import numpy as np

from jspec.buckets import Bucket, Ladder
from jspec.schedule.budget import best_budget
from jspec.schedule.costs import RoundCosts
from jspec.schedule.relay import Arriving, Relay, with_unknown


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lanes:
    """The requests of a round, as the scheduler sees them."""

    slots: tuple[int, ...]  # ascending
    generations: tuple[int, ...]  # how many requests each slot has had, this one included
    ready: tuple[int, ...]  # draft tokens that each has at most
    context: int  # committed tokens, all together


class Scheduler:
    """Chooses buckets by expected tokens per second. Plain rounds, which draft nothing, are a choice.

    Survival is what the relay has: at least two rounds old, or as old as the request's last round that
    drafted. A request that nothing is known of counts as certain to be accepted, so that it is tried.
    """

    PROBE_INTERVAL = 64  # plain rounds in a row after which one drafts, to learn what drafts are worth now

    def __init__(self, *, costs: RoundCosts, ladder: Ladder, max_slots: int):
        """
        Args:
          costs: of rounds by bucket.
          ladder: the buckets that exist.
          max_slots: most requests.
        """
        self._costs, self._ladder = costs, ladder
        self._relay = Relay(max_slots, ladder.draft_length)
        self._round = 0
        self._plain_rounds = 0

    def choose(self, lanes: Lanes) -> Bucket:
        """The bucket of most expected tokens per second for the next round."""
        self._round += 1
        buckets = self._useful(lanes)
        known = self._relay.resolve(self._round, lanes.slots) or self._relay.latest(lanes.slots)
        if len(buckets) == 1:
            return buckets[0]
        draft_length = self._ladder.draft_length
        survival = with_unknown(*known, np.asarray(lanes.generations))
        ready = np.arange(draft_length)[None, :] < np.asarray(lanes.ready)[:, None]
        seconds = np.array([self._costs.round_seconds(len(lanes.slots), b, lanes.context) for b in buckets])
        budgets = [bucket.nodes - len(lanes.slots) if bucket.budget else 0 for bucket in buckets]
        choice = best_budget(
            np.where(ready, survival, 0), lambda tokens, _: tokens / seconds, candidates=budgets
        )
        chosen = buckets[budgets.index(choice.budget)]
        if chosen.budget:
            self._plain_rounds = 0
        else:
            self._plain_rounds += 1
            if self._plain_rounds > self.PROBE_INTERVAL:
                self._plain_rounds, chosen = 0, buckets[1]
        return chosen

    def publish(self, lanes: Lanes, survival: Arriving) -> None:
        """Takes over the survival of the round that `choose` was last asked about.

        Args:
          lanes: as given to `choose`.
          survival: float [at least as many lanes, drafts], on its way to the host.
        """
        self._relay.publish(self._round, lanes.slots, np.asarray(lanes.generations), survival)

    def _useful(self, lanes: Lanes) -> list[Bucket]:
        """Plain, and every bucket up to the first that holds all there is to verify."""
        everything = len(lanes.slots) + sum(lanes.ready)
        useful: list[Bucket] = []
        for bucket in self._ladder.scheduled(len(lanes.slots)):
            if useful and useful[-1].nodes >= everything:
                break
            useful.append(bucket)
        return useful
