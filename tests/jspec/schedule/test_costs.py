"""Cost tables: what they say of buckets, and what is refused."""

import dataclasses
import json

import pytest

from jspec.buckets import Bucket, Ladder
from jspec.schedule.costs import Cell, MeasuredCosts, TableCosts, check_costs, load_costs, save_costs
from jspec.schedule.tables import AdditiveTable, StepTable, fit_additive

LADDER = Ladder(max_slots=2, draft_length=3, chunks=(7,))
BUCKETS = [*LADDER.scheduled(1), *LADDER.scheduled(2)]
CELLS = tuple(
    Cell(lanes=b.lanes, nodes=b.nodes, chunk=0, context=10, seconds=0.01 + 0.001 * b.nodes, spread=0.02)
    for b in BUCKETS
)
COSTS = MeasuredCosts(
    hardware="2 cores of a CPU",
    target="table",
    drafter="dspark",
    draft_length=3,
    dtype="float32",
    cells=CELLS,
    context_seconds=1e-5,
)
MINE = dict(hardware="2 cores of a CPU", target="table", drafter="dspark", draft_length=3, dtype="float32")


def test_a_measured_bucket_costs_what_was_measured_plus_its_context():
    bucket = Bucket(lanes=2, nodes=4, chunk=0)
    assert COSTS.round_seconds(2, bucket, 20) == pytest.approx(0.014)
    assert COSTS.round_seconds(2, bucket, 120) == pytest.approx(0.015)
    with pytest.raises(ValueError, match="cells: expected one for 4 lanes and 4 nodes"):
        COSTS.round_seconds(4, Bucket(lanes=4, nodes=4, chunk=0), 0)


def test_a_saved_table_is_read_back_with_its_other_forms(tmp_path):
    save_costs(COSTS, tmp_path / "costs.json")
    assert load_costs(tmp_path / "costs.json") == COSTS
    written = json.loads((tmp_path / "costs.json").read_text())
    for form in ("step", "additive"):
        (tmp_path / "form.json").write_text(json.dumps(written[form]))
        foreign = load_costs(tmp_path / "form.json")
        assert isinstance(foreign, TableCosts)
        for bucket in BUCKETS:
            expected = COSTS.round_seconds(bucket.lanes, bucket, 0)
            assert foreign.round_seconds(bucket.lanes, bucket, 0) == pytest.approx(expected, rel=1e-6)


def test_break_even_is_relative_to_the_plain_round_of_as_many_lanes():
    assert COSTS.break_even()[2] == pytest.approx(
        {b.nodes: (10 + b.nodes) / 12 for b in LADDER.scheduled(2)[1:]}
    )


def test_a_noisy_table_is_not_written(tmp_path):
    noisy = dataclasses.replace(COSTS, cells=(dataclasses.replace(CELLS[0], spread=0.4), *CELLS[1:]))
    with pytest.raises(ValueError, match=r"1 of 9 kinds of rounds beyond it \(worst 40%\)"):
        save_costs(noisy, tmp_path / "costs.json")
    assert not (tmp_path / "costs.json").exists()
    assert (
        len(dataclasses.replace(COSTS, cells=(dataclasses.replace(CELLS[0], spread=float("nan")),)).noisy)
        == 1
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("hardware", "1 x TPU v6e"),
        ("target", "llama"),
        ("drafter", "eagle3"),
        ("draft_length", 7),
        ("dtype", "bfloat16"),
    ],
)
def test_a_table_of_something_else_is_refused(name, value):
    check_costs(COSTS, **MINE, buckets=BUCKETS)
    with pytest.raises(ValueError, match=f"schedule: expected a cost table for {name} {value!r}"):
        check_costs(COSTS, **{**MINE, name: value}, buckets=BUCKETS)


def test_a_table_that_lacks_a_bucket_is_refused():
    with pytest.raises(ValueError, match="cells: expected one for 4 lanes"):
        check_costs(COSTS, **MINE, buckets=[Bucket(lanes=4, nodes=16, chunk=0)])


def test_a_foreign_table_of_smaller_rounds_is_refused():
    table = StepTable(nodes=(1, 4), rounds_per_second=(9.0, 5.0), most_nodes=6)
    check_costs(TableCosts(table=table), **MINE, buckets=LADDER.scheduled(1))
    with pytest.raises(
        ValueError, match="schedule: expected a table for rounds of up to 8 nodes, got one for 6"
    ):
        check_costs(TableCosts(table=table), **MINE, buckets=BUCKETS)


@pytest.mark.parametrize(
    "change",
    [
        {"seconds": 0.0},
        {"seconds": -1.0},
        {"seconds": float("nan")},
        {"nodes": 0},
        {"context": -1},
    ],
)
def test_cells_that_are_not_positive_are_refused(change):
    with pytest.raises(ValueError, match="cells: expected positive seconds"):
        dataclasses.replace(COSTS, cells=(dataclasses.replace(CELLS[0], **change),))


@pytest.mark.parametrize("cells", [(), (CELLS[0], CELLS[0])])
def test_no_cell_and_two_of_a_kind_are_refused(cells):
    with pytest.raises(ValueError, match="cells: expected at least one, and one per kind"):
        dataclasses.replace(COSTS, cells=cells)


STEP = {"sample_batch_tokens": [1, 4], "sample_steps_per_sec": [9.0, 5.0], "max_batch_tokens": 8}
ADDITIVE = {
    "bias_seconds": 0.1,
    "bs_probes": [1, 2],
    "alpha_seconds": [0.0, 0.1],
    "m_probes": [1, 4],
    "theta_seconds": [0.0, 0.2],
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({**STEP, "sample_batch_tokens": [4, 1]}, "sample_batch_tokens: expected whole numbers"),
        ({**STEP, "sample_batch_tokens": [4, 4]}, "sample_batch_tokens: expected whole numbers"),
        ({**STEP, "sample_batch_tokens": [0, 4]}, "sample_batch_tokens: expected whole numbers"),
        ({**STEP, "sample_batch_tokens": "1, 4"}, "sample_batch_tokens: expected numbers"),
        ({**STEP, "sample_batch_tokens": [1, 4.5]}, "sample_batch_tokens: expected whole numbers"),
        ({**STEP, "sample_steps_per_sec": [9.0, 0.0]}, "sample_steps_per_sec: expected 2 positive numbers"),
        ({**STEP, "sample_steps_per_sec": [9.0, -5.0]}, "sample_steps_per_sec: expected 2 positive numbers"),
        ({**STEP, "sample_steps_per_sec": [9.0]}, "sample_steps_per_sec: expected 2 positive numbers"),
        ({**STEP, "max_batch_tokens": 3}, "max_batch_tokens: expected at least the last probe 4"),
        ({**ADDITIVE, "bias_seconds": 0.0}, "bias_seconds: expected a positive number"),
        ({**ADDITIVE, "bias_seconds": "1"}, "bias_seconds: expected numbers"),
        ({**ADDITIVE, "bs_probes": [2, 1]}, "bs_probes: expected whole numbers"),
        ({**ADDITIVE, "theta_seconds": [0.0, float("inf")]}, "theta_seconds: expected 2 finite numbers"),
        ({"sample_batch_tokens": [1]}, "cost table: expected the fields"),
        (
            {"sample_batch_tokens": [1], "sample_steps_per_sec": [1.0], "max_batch_tokens": 8},
            "cost table: expected at least 2 probes",
        ),
        ({"cells": []}, "schedule: expected the fields"),
        ({**dataclasses.asdict(COSTS), "cells": [{"lanes": 1}]}, "cells: expected a list of numbers"),
        (
            {**dataclasses.asdict(COSTS), "context_seconds": "1"},
            "context_seconds: expected a number, got '1'",
        ),
        ([1, 2], "schedule: expected a JSON object"),
    ],
)
def test_files_that_are_wrong_are_refused(tmp_path, values, message):
    (tmp_path / "costs.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        load_costs(tmp_path / "costs.json")


def test_a_file_that_is_not_there_or_no_json_is_refused(tmp_path):
    (tmp_path / "costs.json").write_text("{")
    for name in ("costs.json", "missing.json"):
        with pytest.raises(ValueError, match="schedule: expected a JSON file"):
            load_costs(tmp_path / name)


def test_fitting_recovers_the_parts_of_an_additive_table():
    table = AdditiveTable(
        bias_seconds=0.01,
        lanes=(1, 2, 4),
        lane_seconds=(0.0, 0.002, 0.003),
        nodes=(1, 4, 8),
        node_seconds=(0.0, 0.01, 0.05),
    )
    cells = [(lanes, n, float(table.seconds(lanes, n))) for lanes in table.lanes for n in table.nodes]
    fit = fit_additive(cells)
    assert fit.table.to_json() == {key: pytest.approx(value) for key, value in table.to_json().items()}
    assert fit.rms_seconds < 1e-12 and fit.r_squared == pytest.approx(1)
    with pytest.raises(ValueError, match="cells: expected at least 4"):
        fit_additive(cells[:3])


def test_between_probes_a_step_table_keeps_the_lower_one():
    table = StepTable(nodes=(2, 8), rounds_per_second=(10.0, 4.0), most_nodes=8)
    assert [float(table.rate(n)) for n in (1, 2, 7, 8, 90)] == [10, 10, 10, 4, 4]
