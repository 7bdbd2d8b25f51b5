"""The host's choice: brute force over flat, rising and stair-step costs; ages, generations, probes."""

import dataclasses
import itertools

import numpy as np
import pytest

from jspec.buckets import Ladder
from jspec.schedule.budget import best_budget
from jspec.schedule.history import History
from jspec.schedule.relay import Known, Relay
from jspec.schedule.scheduler import Lanes, Scheduler

M = 3
LADDER = Ladder(max_slots=4, draft_length=M, chunks=(7,))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    base: float = 1.0
    per_node: float = 0.0
    draft: float = 0.0
    stairs: int = 1

    def round_seconds(self, requests, bucket, context):
        nodes = -(-bucket.nodes // self.stairs) * self.stairs
        return self.base + self.per_node * nodes + (self.draft if bucket.budget else 0.0)


class Arriving:
    def __init__(self, rows, ready=True):
        self.rows, self.ready = np.asarray(rows, np.float32), ready

    def is_ready(self):
        return self.ready

    def __array__(self, dtype=None, copy=None):
        assert self.ready, "waited for a copy"
        return self.rows


def lanes(count=2, generation=1, ready=M, least=0.0):
    return Lanes(
        slots=tuple(range(count)),
        generations=(generation,) * count,
        ready=(ready,) * count,
        least_survival=(least,) * count,
        context=0,
    )


def publish(scheduler, decision, rows, ready=True):
    scheduler.publish(decision, Arriving(rows, ready), here=[True] * len(rows))


def taught(costs, rows, rounds=24, **options):
    """A scheduler that has seen these rows for long."""
    scheduler = Scheduler(costs=costs, ladder=LADDER, max_slots=4, **options)
    for _ in range(rounds):
        publish(scheduler, scheduler.choose(lanes(len(rows))), rows)
    return scheduler


COSTS = {
    "flat": Costs(),
    "rising": Costs(per_node=0.2),
    "dear drafts": Costs(per_node=0.05, draft=1.0),
    "stairs": Costs(per_node=0.2, stairs=4),
    "steep": Costs(base=0.01, per_node=1.0, draft=0.1),
}


@pytest.mark.parametrize("costs", COSTS)
@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_the_bucket_is_the_best_of_all_that_exist(costs, count):
    rng = np.random.default_rng(count)
    for _ in range(5):
        rows = np.cumprod(rng.random((count, M)), axis=1).astype(np.float32)
        chosen = taught(COSTS[costs], rows).choose(lanes(count)).bucket
        ordered = np.sort(rows.reshape(-1))[::-1].astype(np.float64)
        speeds = {}
        for bucket in LADDER.scheduled(count):
            room = bucket.nodes - count if bucket.budget else 0
            speeds[bucket] = (count + ordered[:room].sum()) / COSTS[costs].round_seconds(count, bucket, 0)
        assert speeds[chosen] == pytest.approx(max(speeds.values()), rel=1e-6)


def test_flat_costs_verify_everything_and_steep_ones_nothing():
    rows = [(0.9, 0.5, 0.1)] * 2
    assert taught(COSTS["flat"], rows).choose(lanes()).bucket.nodes == 2 * (M + 1)
    assert taught(COSTS["steep"], rows).choose(lanes()).bucket.budget == 0


def test_no_larger_bucket_than_there_is_to_verify():
    scheduler = taught(COSTS["flat"], [(0.9, 0.9, 0.9)] * 2)
    assert scheduler.choose(lanes(ready=1)).bucket.nodes == 4
    assert scheduler.choose(lanes(ready=0)).bucket.budget == 0


def test_a_request_that_nothing_is_known_of_is_tried_and_later_ones_count_as_typical():
    costs = Costs(base=0.5, per_node=1.0, draft=0.5)
    fresh = Scheduler(costs=costs, ladder=LADDER, max_slots=4)
    assert fresh.choose(lanes()).bucket.budget
    typical = taught(costs, [(0.01, 0.01, 0.01)] * 2)
    assert not typical.choose(lanes(generation=2)).bucket.budget
    told = Scheduler(costs=costs, ladder=LADDER, max_slots=4, typical=(0.1, 0.0, 0.0))
    assert not told.choose(lanes()).bucket.budget


def test_rows_of_an_earlier_request_on_the_slot_are_not_used():
    history = History(2, M, typical=np.full((M,), 0.5, np.float32))
    rows = np.array([(0.9, 0.8, 0.7)], np.float32)
    for round_ in range(History.DEPTH):
        history.add([1], Known(rows=rows, generations=np.array([3]), rounds=np.array([round_])))
    np.testing.assert_allclose(history.samples([1], [3])[:, 0], np.tile(rows, (History.DEPTH, 1)))
    other = history.samples([1], [4])
    assert other.shape == (History.DEPTH, 1, M)
    assert not (other == rows).any()
    first = np.array([(0.3, 0.2, 0.1)], np.float32)
    history.add([1], Known(rows=first, generations=np.array([4]), rounds=np.array([History.DEPTH])))
    own = history.samples([1], [4])[:, 0]
    assert (own == first).all(axis=1).sum() == 1 and not (own == rows).any()


def test_nothing_younger_than_two_rounds_is_used_and_nothing_is_waited_for():
    relay = Relay(2, M)
    for round_ in range(1, 4):
        known = relay.resolve(round_, [0])
        if round_ < 3:
            assert known is None or known.generations.tolist() == [0]
        else:
            assert known is not None and known.rounds.tolist() == [1]
        relay.publish(round_, [0], np.array([1]), Arriving([(0.1 * round_,) * M]))
    late = Arriving([(0.7,) * M], ready=False)
    relay.publish(4, [0], np.array([1]), late)
    assert relay.resolve(6, [0]) is None
    late.ready = True
    known = relay.resolve(7, [0])
    assert known is not None and known.rounds.tolist() == [4]


def test_a_copy_that_never_arrives_leaves_the_scheduler_deciding_on_what_it_has():
    scheduler = taught(COSTS["flat"], [(0.9, 0.5, 0.1)] * 2)
    publish(scheduler, scheduler.choose(lanes()), [(0.9, 0.5, 0.1)] * 2, ready=False)
    for _ in range(5):
        assert scheduler.choose(lanes()).bucket.nodes == 2 * (M + 1)


def test_plain_rounds_are_interrupted_by_probes_of_bounded_cost():
    costs = Costs(base=1.0, per_node=0.5, draft=1.0)
    scheduler = taught(costs, [(0.01, 0.01, 0.01)] * 2, rounds=30)
    buckets = [scheduler.choose(lanes()).bucket for _ in range(4000)]
    probes = [bucket for bucket in buckets if bucket.budget]
    assert probes and all(bucket == LADDER.scheduled(2)[1] for bucket in probes)
    plain = costs.round_seconds(2, LADDER.scheduled(2)[0], 0)
    extra = sum(costs.round_seconds(2, bucket, 0) - plain for bucket in probes)
    assert extra <= 0.006 * plain * len(buckets)


def test_a_probe_that_shows_better_drafts_ends_plain_decoding():
    costs = Costs(base=1.0, per_node=0.5, draft=0.1)
    scheduler = taught(costs, [(0.01, 0.01, 0.01)] * 2, rounds=30)
    drafted = 0
    for _ in range(3000):
        decision = scheduler.choose(lanes())
        if decision.bucket.budget:
            drafted += 1
            publish(scheduler, decision, [(0.99, 0.98, 0.97)] * 2)
    assert drafted > 500


def test_typical_survival_of_another_draft_length_is_refused():
    with pytest.raises(ValueError, match="typical: expected survival of 3 draft tokens, got 2"):
        Scheduler(costs=Costs(), ladder=LADDER, max_slots=4, typical=(0.5, 0.5))


def test_a_budget_over_samples_is_the_best_of_their_mean():
    samples = np.array([[(0.9, 0.2)], [(0.1, 0.05)]], np.float32)
    choice = best_budget(samples, lambda tokens, budgets: tokens / (1 + 0.4 * budgets))
    expected = [1.0, 1.5 / 1.4, 1.625 / 1.8]
    assert choice.budget == int(np.argmax(expected))
    assert choice.tokens_per_second == pytest.approx(max(expected))


def test_scheduled_buckets_grow_by_half_or_less_and_end_at_everything():
    for count in (1, 2, 4):
        nodes = [bucket.nodes for bucket in LADDER.scheduled(count)]
        assert nodes[0] == count and nodes[-1] == count * (M + 1)
        assert all(b <= max(1.5 * a, a + 1) for a, b in itertools.pairwise(nodes))


def test_a_request_that_has_left_teaches_nothing():
    rows = [(0.9, 0.9, 0.9), (0.01, 0.01, 0.01)]
    scheduler = Scheduler(costs=COSTS["rising"], ladder=LADDER, max_slots=4)
    for _ in range(2 * History.DEPTH):
        scheduler.publish(scheduler.choose(lanes()), Arriving(rows), here=[True, False])
    own = scheduler._history.samples([0, 1], [1, 1])
    np.testing.assert_allclose(own, np.full_like(own, 0.9), atol=1e-6)


def test_draft_tokens_below_what_a_request_asks_for_buy_nothing():
    scheduler = taught(COSTS["rising"], [(0.9, 0.5, 0.4)] * 2)
    assert scheduler.choose(lanes()).bucket.nodes > 4
    assert scheduler.choose(lanes(least=0.6)).bucket.nodes == 4
    assert scheduler.choose(lanes(least=0.95)).bucket.budget == 0


def test_a_plain_round_says_what_drafting_would_have_cost_and_brought():
    costs = Costs(per_node=1.0, draft=0.5)
    decision = taught(costs, [(0.1, 0.0, 0.0)] * 2).choose(lanes())
    best = LADDER.scheduled(2)[1]
    ratio = costs.round_seconds(2, best, 0) / costs.round_seconds(2, LADDER.scheduled(2)[0], 0)
    assert decision.bucket.budget == 0 and decision.declined is not None
    assert f"at this load, 2 requests, {best.budget} draft tokens" in decision.declined
    assert f"take {ratio:.2f} times as long, for an expected 1.05 times as many tokens" in decision.declined
    assert taught(COSTS["flat"], [(0.1, 0.0, 0.0)] * 2).choose(lanes()).declined is None
    assert taught(costs, [(0.1, 0.0, 0.0)] * 2).choose(lanes(ready=0)).declined is None
