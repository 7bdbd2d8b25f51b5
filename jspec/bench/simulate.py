"""What a schedule gains, without a model: acceptance traces and costs of rounds, and nothing else."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.bench.traces import Trace
from jspec.buckets import Bucket, Ladder
from jspec.schedule.allotment import LEAST_SURVIVAL
from jspec.schedule.costs import RoundCosts
from jspec.schedule.scheduler import Lanes, Scheduler

POLICIES = ("plain", "full", "scheduled")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A simulated run."""

    policy: str
    concurrency: int
    tokens: int
    seconds: float
    rounds: int
    verified: int  # draft tokens
    budget: int  # draft tokens that there was room for

    @property
    def tokens_per_second(self) -> float:
        """Over all requests."""
        return self.tokens / self.seconds


def simulate(
    traces: Sequence[Trace], costs: RoundCosts, policy: str, concurrency: int, *, max_slots: int = 32
) -> Outcome:
    """Decodes the traces' requests in a closed loop: when one ends, the next takes its slot, over and over.

    It ends once as many tokens were emitted as all traces hold, so that slots never run empty. The schedule
    is the one that an engine uses, its relay and lag included.

    Args:
      traces: of as many draft tokens each.
      costs: of rounds; prompts cost nothing here.
      policy: "plain", "full" (every draft token verified) or "scheduled".
      concurrency: requests that run together.
      max_slots: of the engine, at least `concurrency`.

    Raises:
      ValueError: an unknown policy, or more requests than slots.
    """
    if policy not in POLICIES:
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, got {policy!r}; pick one of these")
    if not 1 <= concurrency <= max_slots:
        raise ValueError(
            f"concurrency: expected 1 to the {max_slots} slots, got {concurrency}; raise max_slots"
        )
    draft_length = traces[0].confidence.shape[1]
    ladder = Ladder(max_slots=max_slots, draft_length=draft_length, chunks=(1,))
    typical = np.mean([np.cumprod(t.confidence, axis=1).mean(axis=0) for t in traces], axis=0)
    scheduler = Scheduler(costs=costs, ladder=ladder, max_slots=max_slots, typical=typical.tolist())
    goal = sum(len(trace.accept_lengths) for trace in traces)
    following = itertools.cycle(range(len(traces)))
    running: dict[int, tuple[int, int]] = {}  # slot -> trace, position
    generations = [0] * max_slots
    tokens = rounds = verified = room = 0
    seconds = 0.0
    while tokens < goal:
        for slot in range(concurrency):
            if slot not in running:
                running[slot] = next(following), 0
                generations[slot] += 1
        slots = sorted(running)
        left = [len(traces[t].accept_lengths) - position for t, position in (running[s] for s in slots)]
        ready = tuple(min(draft_length, n - 1) for n in left)
        lanes = Lanes(
            slots=tuple(slots),
            generations=tuple(generations[s] for s in slots),
            ready=ready,
            least_survival=(0.0,) * len(slots),
            context=sum(position for _, position in running.values()),
        )
        decision = scheduler.choose(lanes) if policy == "scheduled" else None
        if decision is not None:
            bucket = decision.bucket
        else:
            bucket = ladder.decode(len(slots), [0] if policy == "plain" else ready)
        confidence = np.stack([traces[running[s][0]].confidence[running[s][1]] for s in slots])
        survival = np.cumprod(confidence, axis=1)
        lengths = np.zeros((len(slots),), np.int64)
        if bucket.budget:
            budget = bucket.nodes - len(slots)
            room += budget
            if decision is None:
                lengths = np.asarray(ready)
            else:
                lengths = allotted(survival, np.asarray(ready), budget)
                arrived = Arrived(rows=survival.astype(np.float32))
                scheduler.publish(decision, arrived, here=[True] * len(slots))
        seconds += costs.round_seconds(len(slots), bucket, lanes.context)
        rounds += 1
        verified += int(lengths.sum())
        for slot, length, most in zip(slots, lengths, left, strict=True):
            trace, position = running[slot]
            emitted = min(min(int(traces[trace].accept_lengths[position]), int(length)) + 1, most)
            tokens += emitted
            running[slot] = trace, position + emitted
            if emitted == most:
                del running[slot]
    return Outcome(
        policy=policy,
        concurrency=concurrency,
        tokens=tokens,
        seconds=seconds,
        rounds=rounds,
        verified=verified,
        budget=room,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrived:
    """Rows that are on the host already."""

    rows: np.ndarray

    def is_ready(self) -> bool:
        """Yes."""
        return True

    def __array__(self, dtype: object = None, copy: object = None) -> np.ndarray:
        return self.rows


def allotted(survival: np.ndarray, lengths: np.ndarray, budget: int) -> np.ndarray:
    """`jspec.schedule.allotment.allot` without a device, for lanes in the order of their slots."""
    lanes, drafts = survival.shape
    position = np.broadcast_to(np.arange(drafts), survival.shape)
    wanted = (position < lengths[:, None]) & (survival >= LEAST_SURVIVAL)
    lane = np.broadcast_to(np.arange(lanes)[:, None], survival.shape)
    order = np.lexsort((lane[wanted], position[wanted], -survival[wanted]))[:budget]
    return np.bincount(lane[wanted][order], minlength=lanes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Roofline:
    """Rounds of an accelerator: weights are read once, and past a number of nodes arithmetic is the limit.

    Args:
      draft_length: draft tokens.
      ridge: nodes that take as long as reading the weights.
      tile: nodes are rounded up to a multiple, which makes stairs.
      overhead: of a round, as a fraction of reading the weights.
      draft: of a drafting pass over one node per lane and draft token, as a fraction of a target pass.
      weights: seconds of reading the weights.
    """

    draft_length: int
    ridge: float
    tile: int = 1
    overhead: float = 0.1
    draft: float = 0.1
    weights: float = 0.01

    def round_seconds(self, requests: int, bucket: Bucket, context: int) -> float:
        """See `RoundCosts.round_seconds`."""
        drafting = self.draft * self._passes(bucket.lanes * self.draft_length) if bucket.budget else 0.0
        return self.weights * (self.overhead + self._passes(bucket.nodes) + drafting)

    def _passes(self, nodes: int) -> float:
        return max(1.0, -(-nodes // self.tile) * self.tile / self.ridge)


# Of accelerators, by name; see `Roofline`.
CURVES: Mapping[str, Mapping[str, Any]] = {
    "flat": {"ridge": math.inf},
    "roofline": {"ridge": 64.0},
    "stairs of 32": {"ridge": 64.0, "tile": 32},
    "stairs of 64": {"ridge": 96.0, "tile": 64},
    "dear drafts": {"ridge": 32.0, "draft": 0.4},
    "arithmetic": {"ridge": 4.0, "overhead": 0.3},
}


def curve_costs(name: str, draft_length: int) -> Roofline:
    """The costs of one of `CURVES` for a drafter of so many draft tokens."""
    return Roofline(draft_length=draft_length, **CURVES[name])


def compare(
    traces: Sequence[Trace],
    costs: RoundCosts,
    concurrencies: Sequence[int],
    *,
    max_slots: int = 32,
    progress: Callable[[str], None] = lambda _: None,
) -> list[dict[str, Outcome]]:
    """All policies at each concurrency."""
    rows = []
    for concurrency in concurrencies:
        progress(f"{concurrency} requests at a time")
        rows.append(
            {policy: simulate(traces, costs, policy, concurrency, max_slots=max_slots) for policy in POLICIES}
        )
    return rows
