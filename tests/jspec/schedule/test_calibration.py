"""Fits on data whose truth is known, and calibrations that belong to something else."""

import dataclasses
import json

import numpy as np
import pytest

from jspec.schedule.calibration import (
    expected_calibration_error,
    fit_grid,
    fit_likelihood,
    prefix_outcomes,
    reliability,
    sigmoid,
)
from jspec.schedule.calibration_file import Calibration, load_calibration, save_calibration

TRUE = ((2.0, 0.0), (0.5, 0.0), (1.5, 0.6))


def rounds(count=20_000, seed=0):
    rng = np.random.default_rng(seed)
    logits = 1.5 * rng.normal(size=(count, len(TRUE))) + 0.5
    probs = sigmoid(logits / [t for t, _ in TRUE] + [b for _, b in TRUE])
    accepted = np.cumprod(rng.random(probs.shape) < probs, axis=1).sum(axis=1)
    return logits, prefix_outcomes(accepted, len(TRUE))


def test_likelihood_recovers_scale_and_shift_of_every_position():
    fitted = fit_likelihood(*rounds())
    np.testing.assert_allclose(fitted.temperatures, [t for t, _ in TRUE], rtol=0.12)
    np.testing.assert_allclose(fitted.offsets, [b for _, b in TRUE], atol=0.1)


@pytest.mark.parametrize("fit", [fit_grid, fit_likelihood])
def test_fits_calibrate_rounds_that_they_have_not_seen(fit):
    fitted = fit(*rounds())
    assert np.mean(fitted.ece_after) < np.mean(fitted.ece_before)
    logits, outcomes = rounds(seed=1)
    before, after = np.cumprod(sigmoid(logits), axis=1), np.cumprod(fitted.confidence(logits), axis=1)
    errors = [
        [expected_calibration_error(probs[:, j], outcomes[:, j]) for j in range(len(TRUE))]
        for probs in (before, after)
    ]
    assert np.mean(errors[1]) < 0.5 * np.mean(errors[0])
    assert max(errors[1][:2]) < 0.015  # the third needs a shift, which temperatures do not have


def test_grid_takes_the_first_of_equal_temperatures():
    logits, outcomes = np.zeros((10, 1)), np.ones((10, 1))
    assert fit_grid(logits, outcomes, grid=np.array([2.0, 1.0])).temperatures == (2.0,)


def test_few_rounds_move_the_likelihood_fit_little():
    fitted = fit_likelihood(np.array([[3.0], [-2.0]]), np.array([[1.0], [0.0]]))
    assert 0.4 < fitted.temperatures[0] < 1.1
    assert abs(fitted.offsets[0]) < 0.5


def test_calibration_error_by_hand():
    probs, outcomes = np.array([0.1, 0.1, 0.9, 1.0]), np.array([0, 1, 1, 1])
    assert expected_calibration_error(probs, outcomes, 2) == pytest.approx((0.8 + 0.1) / 4)
    assert reliability(probs, outcomes, 2) == [(pytest.approx(0.1), 0.5, 2), (pytest.approx(0.95), 1.0, 2)]


@pytest.mark.parametrize("logits", [np.zeros((0, 2)), np.zeros((3,)), np.full((2, 2), np.nan)])
def test_unusable_logits_are_refused(logits):
    with pytest.raises(ValueError, match="logits: expected"):
        fit_grid(logits, np.zeros(logits.shape))


CALIBRATION = Calibration(
    temperatures=(1.0, 2.0),
    offsets=(0.0, 0.1),
    survival=(0.8, 0.5),
    target="table",
    drafter="dspark",
    dataset="words",
    num_samples=10,
    ece_before=(0.1, 0.2),
    ece_after=(0.05, 0.1),
    fit="likelihood",
)


def test_a_saved_calibration_is_read_back(tmp_path):
    save_calibration(CALIBRATION, tmp_path / "calibration.json")
    assert load_calibration(tmp_path / "calibration.json") == CALIBRATION


def test_a_calibration_of_another_program_says_less(tmp_path):
    foreign = {
        "temperatures": [1.0, 2.0],
        "dataset": "x",
        "num_samples": 4,
        "offsets": None,
        "ece_before": None,
        "ece_after": [0, 0],
    }
    (tmp_path / "calibration.json").write_text(json.dumps(foreign))
    loaded = load_calibration(tmp_path / "calibration.json")
    assert loaded.curve.offsets == (0.0, 0.0) and loaded.target is None
    assert len(loaded.ece_before) == 2 and loaded.ece_after == (0.0, 0.0)
    loaded.check(target="any", drafter="any", draft_length=2)
    with pytest.raises(ValueError, match="calibration: expected one for draft_length 3, got one for 2"):
        loaded.check(target="any", drafter="any", draft_length=3)


@pytest.mark.parametrize(("name", "value"), [("target", "llama"), ("drafter", "eagle3"), ("draft_length", 7)])
def test_a_calibration_of_something_else_is_refused(name, value):
    mine = dict(target="table", drafter="dspark", draft_length=2)
    CALIBRATION.check(**mine)
    with pytest.raises(ValueError, match=f"calibration: expected one for {name} {value!r}"):
        CALIBRATION.check(**{**mine, name: value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperatures": [1.0, 0.0]}, "temperatures: expected positive"),
        ({"temperatures": [1.0, -2.0]}, "temperatures: expected positive"),
        ({"temperatures": [1.0, float("nan")]}, "temperatures: expected positive"),
        ({"temperatures": "1"}, "temperatures: expected a list"),
        ({"temperatures": [1.0]}, "offsets: expected 1 numbers"),
        ({"temperatures": []}, "expected 0 numbers|expected positive"),
        ({"survival": [0.5, 1.5]}, "survival: expected numbers in"),
        ({"offsets": [0.0, float("inf")]}, "offsets: expected 2 finite"),
        ({"unknown": 1}, "calibration: expected temperatures and no names but"),
    ],
)
def test_calibrations_that_are_wrong_are_refused(tmp_path, change, message):
    values = {**dataclasses.asdict(CALIBRATION), **change}
    (tmp_path / "calibration.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=message):
        load_calibration(tmp_path / "calibration.json")
