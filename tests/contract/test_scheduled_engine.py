"""An engine with a schedule: the same tokens as without, of as many draft tokens as the costs suggest."""

import dataclasses
import functools
import itertools

import jax.numpy as jnp
import pytest
from contract.engines import OTHERS, TABLE, M, engine, shared

from jspec.buckets import Bucket
from jspec.loading import with_drafter
from jspec.schedule.calibration_file import Calibration
from jspec.schedule.scheduler import Scheduler
from jspec.settings import Settings

PROMPTS = [[1, 2, 3], [4], [5, 5, 5, 5, 5, 5, 5, 5, 5], [7, 0], [2, 2]]
SLOTS = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """Seconds of a round by its nodes, and of drafting."""

    per_node: float
    draft: float = 0.0
    stairs: int = 1  # nodes are rounded up to a multiple

    def round_seconds(self, requests: int, bucket, context: int) -> float:
        nodes = -(-bucket.nodes // self.stairs) * self.stairs
        return 1.0 + self.per_node * nodes + (self.draft if bucket.budget else 0.0)


FLAT, RISING, STEEP, STAIRS = (
    Linear(per_node=0.0),
    Linear(per_node=0.1),
    Linear(per_node=100.0, draft=100.0),
    Linear(per_node=0.2, stairs=4),
)
COSTS = {"flat": FLAT, "rising": RISING, "steep": STEEP, "stairs": STAIRS}


def scheduled(costs: Linear):
    used = shared("confident", costs=FLAT, max_slots=SLOTS)
    used._scheduler = Scheduler(costs=costs, ladder=used.ladder, max_slots=SLOTS)
    return used


def line(token: int, count: int) -> tuple[int, ...]:
    tokens = []
    for _ in range(count):
        token = int(TABLE[token].argmax())
        tokens.append(token)
    return tuple(tokens)


@pytest.mark.parametrize("costs", COSTS)
def test_greedy_requests_keep_their_line_at_any_cost(costs):
    mixed = [Settings(max_tokens=12 + i, temperature=float(i % 2)) for i in range(len(PROMPTS))]
    results = scheduled(COSTS[costs]).generate(PROMPTS, mixed)
    for index in (0, 2, 4):
        assert results[index].token_ids == line(PROMPTS[index][-1], 12 + index)
        assert results[index].scheduled


@pytest.mark.parametrize("costs", COSTS)
def test_seeded_requests_equal_plain_decoding_at_any_cost(costs):
    settings = [Settings(max_tokens=13, temperature=1.1, seed=i) for i in range(len(PROMPTS))]
    expected = [result.token_ids for result in shared("plain").generate(PROMPTS, settings)]
    assert [r.token_ids for r in scheduled(COSTS[costs]).generate(PROMPTS, settings)] == expected


@pytest.mark.parametrize("drafter", ["tree", "dspark"])
def test_trees_and_networks_are_scheduled_like_any_other_drafter(drafter):
    used = engine(drafter, costs=RISING, max_slots=1)
    settings = [Settings(max_tokens=12), Settings(max_tokens=12, temperature=0.8, seed=3)]
    results = used.generate([[1], [2]], settings)
    assert results[0].token_ids == line(1, 12)
    assert results[1].token_ids == shared("plain").generate([[2]], settings[1])[0].token_ids
    counters = [result.counters for result in results]
    assert 0 < sum(c.verified for c in counters) <= sum(c.proposed for c in counters)
    assert sum(c.verified for c in counters) <= sum(c.budget for c in counters)


@pytest.mark.parametrize("budget", range(SLOTS * M + 1))
def test_every_budget_gives_the_same_tokens_and_is_kept(budget, monkeypatch):
    used = scheduled(FLAT)
    real, verified = used.programs.propose, []

    def with_budget(bucket, models, state, lanes, certain, most):
        round_ = real(bucket, models, state, lanes, certain, min(budget, most))
        verified.append(int(jnp.sum(jnp.where(jnp.asarray(lanes) >= 0, round_.verify_lengths, 0))))
        return round_

    monkeypatch.setattr(used.programs, "propose", with_budget)
    seeded = Settings(max_tokens=11, temperature=0.9, seed=5)
    results = used.generate([[1], [2], [3]], [Settings(max_tokens=11), seeded, Settings(max_tokens=11)])
    monkeypatch.undo()
    assert max(verified) == budget if budget else max(verified) == 0
    assert results[0].token_ids == line(1, 11)
    assert results[1].token_ids == shared("plain").generate([[2]], seeded)[0].token_ids
    assert results[2].token_ids == line(3, 11)


def test_the_schedule_learns_of_drafts_that_a_small_round_has_no_room_for():
    used, bucket, published = scheduled(FLAT), Bucket(lanes=1, nodes=2, chunk=0), []

    def note(active, bucket, round_, report):
        if bucket.budget:
            published.append(round_.survival)

    with used.session(observer=note) as session:
        session.add([[1]], Settings(max_tokens=12, temperature=1.0))
        while session.prefilling:
            session.step()
        session.step(bucket)
        session.step(Bucket(lanes=1, nodes=1 + M, chunk=0))
    small, full = published
    assert small.shape == full.shape == (1, M)
    assert 0 < float(small[0, -1]) < float(small[0, 0]) < 1


def test_a_flat_table_verifies_everything_and_a_steep_one_nothing():
    settings = Settings(max_tokens=20)
    flat = scheduled(FLAT).generate([[1]], settings)[0].counters
    assert flat.verified == flat.proposed > 0
    assert flat.budget >= flat.verified
    steep = scheduled(STEEP).generate([[1]], settings)[0].counters
    assert (steep.proposed, steep.verified, steep.budget, steep.rounds) == (0, 0, 0, 19)


def test_each_bucket_is_traced_once_and_warming_up_knows_them_all():
    used = engine("confident", costs=RISING, max_slots=1)
    used.warm_up(prompt_lengths=(2,))
    warm = dict(used.programs.traces)
    used.generate([[1, 2], [3, 1], [4, 4]], Settings(max_tokens=15))
    assert dict(used.programs.traces) == warm
    assert set(warm.values()) == {1}


def test_confidence_that_is_no_probability_is_counted_and_changes_no_token(monkeypatch):
    confidence = jnp.array([jnp.nan, 1.5, -0.1, jnp.inf, 0.2, 0.9, 1.0, 0.0], jnp.float32)
    used, settings = scheduled(RISING), Settings(max_tokens=20)
    good = used.generate([[1], [2]], settings)
    params = (used.models.drafter[0], confidence)
    monkeypatch.setattr(used._runner, "models", dataclasses.replace(used.models, drafter=params))
    bad = used.generate([[1], [2]], settings)
    monkeypatch.undo()
    assert [r.token_ids for r in bad] == [line(1, 20), line(2, 20)]
    assert sum(r.counters.unusable_confidences for r in bad) > 0
    assert sum(r.counters.unusable_confidences for r in good) == 0


def test_a_session_takes_requests_while_others_run():
    with scheduled(RISING).session() as session:
        session.add([[1]], Settings(max_tokens=12))
        pieces = list(itertools.chain(*(session.step() for _ in range(4))))
        assert session.add([[2], [3]], Settings(max_tokens=9)) == [1, 2]
        while session.busy:
            pieces += session.step()
        results = [session.result(index) for index in range(3)]
    assert [r.token_ids for r in results] == [line(1, 12), line(2, 9), line(3, 9)]
    for index, result in enumerate(results):
        assert tuple(t for p in pieces if p.index == index for t in p.token_ids) == result.token_ids


def test_schedule_and_calibration_come_with_a_drafter_and_are_held_against_it():
    base = engine("plain", max_slots=1)
    drafter, params = OTHERS["confident"]
    calibration = Calibration(
        temperatures=(1.5,) * M,
        offsets=(0.2,) * M,
        survival=(0.5, 0.3, 0.1),
        target=base.method.target.identity,
        drafter=drafter.name,
        dataset="words",
        num_samples=1,
        ece_before=(0.1,) * M,
        ece_after=(0.1,) * M,
        fit="likelihood",
    )
    with_schedule = functools.partial(with_drafter, base, drafter, drafter_params=params, schedule=RISING)
    used = with_schedule(calibration=calibration)
    assert used.method.scheduled and used.method.confidence_curve == calibration.curve
    result = used.generate([[1]], Settings(max_tokens=10))[0]
    assert result.token_ids == line(1, 10) and result.scheduled
    other = dataclasses.replace(calibration, target="another table")
    with pytest.raises(ValueError, match="calibration: expected one for target"):
        with_schedule(calibration=other)


def test_a_drafter_without_confidence_has_no_schedule():
    for drafter in ("ngram", "dense", "plain"):
        with pytest.raises(ValueError, match="schedule: expected a drafter that gives confidence, got"):
            engine(drafter, costs=FLAT)


def test_without_costs_everything_is_verified_and_said(caplog):
    with caplog.at_level("INFO", logger="jspec"):
        used = engine("confident")
    assert [r.getMessage() for r in caplog.records if "every draft token is verified" in r.getMessage()]
    result = used.generate([[1]], Settings(max_tokens=12))[0]
    assert not result.scheduled
    assert result.counters.verified == result.counters.proposed
