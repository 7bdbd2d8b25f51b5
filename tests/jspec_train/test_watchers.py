"""Watchers: what TensorBoard and Weights & Biases are told, with stand-ins for their packages."""

import json
import sys
import types
from pathlib import Path

import pytest

from jspec_train.watchers import JsonLog, TensorBoard, WeightsAndBiases


class FakeWriter:
    def __init__(self, folder: str):
        self.folder, self.scalars, self.closed = folder, [], False

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.append((name, value, step))

    def flush(self) -> None: ...

    def close(self) -> None:
        self.closed = True


class FakeRun:
    def __init__(self, id: str):
        self.id, self.logged, self.axes, self.finished = id, [], {}, False

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        self.axes[name] = step_metric

    def log(self, values: dict[str, float]) -> None:
        self.logged.append(values)

    def finish(self) -> None:
        self.finished = True


def test_json_log_appends_to_what_a_resumed_run_wrote_before(tmp_path: Path) -> None:
    JsonLog(tmp_path).on_update(10, {"loss": 2.0})
    JsonLog(tmp_path).on_evaluation(20, {"loss": 1.5})
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines == [
        {"step": 10, "kind": "train", "loss": 2.0},
        {"step": 20, "kind": "evaluation", "loss": 1.5},
    ]


def test_tensorboard_gets_every_value_under_its_kind_and_is_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", types.SimpleNamespace(SummaryWriter=FakeWriter))
    board = TensorBoard(tmp_path)
    board.on_update(10, {"loss": 2.0})
    board.on_evaluation(20, {"loss": 1.5, "accuracy": 0.5})
    board.close()
    writer = board._writer
    assert writer.folder == str(tmp_path / "tensorboard")
    assert writer.scalars == [
        ("train/loss", 2.0, 10),
        ("evaluation/loss", 1.5, 20),
        ("evaluation/accuracy", 0.5, 20),
    ]
    assert writer.closed


def test_a_resumed_run_goes_on_under_the_same_weights_and_biases_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []

    def init(*, id: str | None, **others: object) -> FakeRun:
        asked.append(id)
        return FakeRun(id or "fresh-id")

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    first = WeightsAndBiases(tmp_path / "run", "project", {"seed": 1})
    first.on_update(20, {"loss": 2.0})
    first.close()
    again = WeightsAndBiases(tmp_path / "run", "project", {"seed": 1})
    again.on_update(10, {"loss": 2.5})  # an update that the interrupted run had already logged
    assert asked == [None, "fresh-id"]
    assert first._run.finished
    assert again._run.logged == [{"update": 10, "train/loss": 2.5}]
    assert again._run.axes == {"update": None, "*": "update"}


@pytest.mark.parametrize("package", ["tensorboardX", "wandb"])
def test_a_missing_package_is_named_with_the_setting(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=rf"expected the package {package}, got none; pip install"):
        TensorBoard(tmp_path) if package == "tensorboardX" else WeightsAndBiases(tmp_path, "p", {})
