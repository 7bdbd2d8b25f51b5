"""The host's side of scheduled verification: which bucket the next round runs in."""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from jspec.buckets import Bucket, Ladder
from jspec.schedule.budget import best_budget
from jspec.schedule.costs import RoundCosts
from jspec.schedule.history import History
from jspec.schedule.relay import Arriving, Relay


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lanes:
    """The requests of a round, as the scheduler sees them."""

    slots: tuple[int, ...]  # ascending
    generations: tuple[int, ...]  # how many requests each slot has had, this one included
    ready: tuple[int, ...]  # draft tokens that each has at most
    least_survival: tuple[float, ...]  # of draft tokens that each has verified
    context: int  # committed tokens, all together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decision:
    """What the next round is."""

    bucket: Bucket
    round: int  # its number
    lanes: Lanes
    declined: str | None  # why it does not draft, though there is what to verify


class Scheduler:
    """Chooses buckets by expected tokens per second. Plain rounds, which draft nothing, are a choice.

    What drafts will be worth is taken from the survival of earlier ones, all of them at least two rounds
    old. A request that nothing is known of counts as typical; before anything is known, as certain to be
    accepted, so that it is tried.
    """

    # Of the time of plain rounds, what may be spent on a drafting one now and then: without drafts there is
    # no confidence, and so no way to see that they have become worth their time.
    PROBE_SHARE = 0.005
    LEAST_PROBE_INTERVAL = 32

    def __init__(
        self, *, costs: RoundCosts, ladder: Ladder, max_slots: int, typical: Sequence[float] | None = None
    ):
        """
        Args:
          costs: of rounds by bucket.
          ladder: the buckets that exist.
          max_slots: most requests.
          typical: mean survival by position, as a calibration found it; None = unknown.

        Raises:
          ValueError: `typical` of another draft length.
        """
        if typical is not None and len(typical) != ladder.draft_length:
            raise ValueError(
                f"typical: expected survival of {ladder.draft_length} draft tokens, got {len(typical)}; calibrate again"
            )
        self._costs, self._ladder = costs, ladder
        self._relay = Relay(max_slots, ladder.draft_length)
        self._history = History(
            max_slots,
            ladder.draft_length,
            typical=None if typical is None else np.asarray(typical, np.float32),
        )
        self._round = 0
        self._plain_rounds = 0

    def choose(self, lanes: Lanes) -> Decision:
        """The bucket of most expected tokens per second for the next round."""
        self._round += 1
        count = len(lanes.slots)
        known = self._relay.resolve(self._round, lanes.slots)
        if known is not None:
            self._history.add(lanes.slots, known)
        buckets = self._useful(lanes)
        decide = functools.partial(Decision, round=self._round, lanes=lanes)
        if len(buckets) == 1:
            return decide(bucket=buckets[0], declined=None)
        survival = self._history.samples(lanes.slots, lanes.generations)
        ready = np.arange(survival.shape[2])[None, :] < np.asarray(lanes.ready)[:, None]
        ready = ready & (survival >= np.asarray(lanes.least_survival)[:, None])
        seconds = np.array([self._costs.round_seconds(count, b, lanes.context) for b in buckets])
        budgets = [bucket.nodes - count if bucket.budget else 0 for bucket in buckets]
        speeds = np.zeros(len(buckets))

        def speed(tokens: np.ndarray, _: np.ndarray) -> np.ndarray:
            speeds[:] = tokens / seconds
            return speeds

        choice = best_budget(np.where(ready, survival, 0), speed, candidates=budgets)
        chosen = buckets[budgets.index(choice.budget)]
        if chosen.budget:
            self._plain_rounds = 0
            return decide(bucket=chosen, declined=None)
        self._plain_rounds += 1
        extra = (seconds[1] - seconds[0]) / seconds[0]
        if self._plain_rounds >= max(extra / self.PROBE_SHARE, self.LEAST_PROBE_INTERVAL):
            self._plain_rounds = 0
            return decide(bucket=buckets[1], declined=None)
        best = 1 + int(np.argmax(speeds[1:]))
        costs, brings = seconds[best] / seconds[0], speeds[best] * seconds[best] / count
        return decide(
            bucket=chosen,
            declined=f"at this load, {count} requests, {budgets[best]} draft tokens make a round take {costs:.2f} "
            f"times as long, for an expected {brings:.2f} times as many tokens",
        )

    def publish(self, decision: Decision, survival: Arriving, *, here: Sequence[bool]) -> None:
        """Takes over a round's survival.

        Args:
          decision: by which it ran.
          survival: float [at least as many lanes, drafts], on its way to the host.
          here: whether each lane's request has not left since; what is drafted for one that has says nothing.
        """
        generations = np.where(here, decision.lanes.generations, 0)
        self._relay.publish(decision.round, decision.lanes.slots, generations, survival)

    def _useful(self, lanes: Lanes) -> list[Bucket]:
        """Plain, and every bucket up to the first that holds all there is to verify."""
        everything = len(lanes.slots) + sum(lanes.ready)
        useful: list[Bucket] = []
        for bucket in self._ladder.scheduled(len(lanes.slots)):
            if useful and useful[-1].nodes >= everything:
                break
            useful.append(bucket)
        return useful
