"""The simulator, and what it says about schedules."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.bench.simulate import CURVES, Roofline, allotted, compare, curve_costs, simulate
from jspec.bench.traces import Trace, load_traces, recorded_traces, save_traces, synthetic_traces
from jspec.buckets import Bucket
from jspec.schedule.allotment import allot

TRACES = synthetic_traces(24, tokens=96)


def test_certain_traces_take_as_many_rounds_as_their_blocks():
    sure = [Trace(confidence=np.ones((20, 3)), accept_lengths=np.full((20,), 3)) for _ in range(4)]
    full = simulate(sure, Roofline(draft_length=3, ridge=1e9), "full", 2)
    assert (full.tokens, full.rounds, full.verified) == (80, 10, 60)
    plain = simulate(sure, Roofline(draft_length=3, ridge=1e9), "plain", 2)
    assert (plain.tokens, plain.rounds, plain.verified) == (80, 40, 0)


def test_the_simulators_allotment_is_the_devices():
    rng = np.random.default_rng(0)
    for budget in range(0, 22, 3):
        survival = np.cumprod(np.ceil(rng.random((5, 4)) * 5) / 5, axis=1)
        lengths = rng.integers(0, 5, size=(5,))
        device = allot(
            jnp.asarray(survival, jnp.float32),
            jnp.asarray(lengths, jnp.int32),
            jnp.arange(5, dtype=jnp.int32),
            budget,
        )
        np.testing.assert_array_equal(allotted(survival.astype(np.float32), lengths, budget), device)


@pytest.mark.parametrize("ease", [-0.5, 1.2])
@pytest.mark.parametrize("curve", CURVES)
def test_scheduled_is_never_far_from_the_better_of_plain_and_full(curve, ease):
    traces = TRACES if ease == 1.2 else synthetic_traces(24, tokens=96, mean_logit=ease)
    gains = []
    for row in compare(traces, curve_costs(curve, 7), (1, 4, 16, 32)):
        plain, full, scheduled = (row[p].tokens_per_second for p in ("plain", "full", "scheduled"))
        gains.append(scheduled / max(plain, full))
    assert min(gains) >= 0.98, gains


def test_scheduled_is_ahead_of_both_where_costs_rise():
    row = compare(TRACES, curve_costs("roofline", 7), (16,))[0]
    better = max(row["plain"].tokens_per_second, row["full"].tokens_per_second)
    assert row["scheduled"].tokens_per_second > 1.2 * better


def test_drafting_costs_by_the_drafts_that_there_are():
    bucket = Bucket(lanes=16, nodes=32, chunk=0)
    short, long = (curve_costs("arithmetic", length).round_seconds(16, bucket, 0) for length in (3, 7))
    assert long - short == pytest.approx(0.01 * 0.1 * 16 * (7 - 3) / 4.0)


def test_more_requests_than_slots_and_unknown_policies_are_refused():
    costs = curve_costs("flat", 7)
    with pytest.raises(ValueError, match="concurrency: expected 1 to the 4 slots, got 8"):
        simulate(TRACES, costs, "plain", 8, max_slots=4)
    with pytest.raises(ValueError, match="policy: expected one of plain, full, scheduled, got 'best'"):
        simulate(TRACES, costs, "best", 2)


def test_recorded_rounds_become_traces_by_position_and_survive_a_file(tmp_path):
    confidence = np.array([(0.9, 0.5), (0.2, 0.1), (0.7, 0.6)])
    traces = recorded_traces(confidence, np.array([2, 0, 1]), np.array([0, 0, 1]), np.array([1, 4, 1]))
    assert traces[0].accept_lengths.tolist() == [2, 2, 2, 0]
    assert traces[1].confidence.tolist() == [[0.7, 0.6]]
    save_traces(traces, tmp_path / "traces.jsonl")
    loaded = load_traces(tmp_path / "traces.jsonl")
    for one, other in zip(traces, loaded, strict=True):
        np.testing.assert_array_equal(one.confidence, other.confidence)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{}",
        '{"confidence": [[0.5]], "accept_lengths": [2]}',
        '{"confidence": [[1.5]], "accept_lengths": [1]}',
        '{"confidence": [[NaN]], "accept_lengths": [1]}',
        '{"confidence": [0.5], "accept_lengths": [1]}',
    ],
)
def test_wrong_traces_are_refused(tmp_path, line):
    (tmp_path / "traces.jsonl").write_text(line)
    with pytest.raises(ValueError, match="expected"):
        load_traces(tmp_path / "traces.jsonl")
