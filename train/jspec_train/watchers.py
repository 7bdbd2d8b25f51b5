"""Who is told how a run goes: the terminal, a file, TensorBoard, Weights & Biases."""

import importlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

_SHOWN = ("loss", "walk_accept_length", "accept_length", "samples_per_second")


class Terminal:
    """A progress bar with the latest figures; one line per evaluation. Close it."""

    def __init__(self, console: Console, total_steps: int, done: int):
        """Shows the bar, at `done` updates."""
        self.console = console
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[figures]}"),
            console=console,
        )
        self._task = self._progress.add_task("training", total=total_steps, completed=done, figures="")

        self._progress.start()

    def close(self) -> None:
        """Leaves the bar on the screen."""
        self._progress.stop()

    def on_update(self, step: int, values: Mapping[str, float]) -> None:
        """See `jspec_train.loop.Watcher`."""
        figures = "  ".join(f"{name} {values[name]:.3g}" for name in _SHOWN if name in values)
        self._progress.update(self._task, completed=step, figures=figures)
        if not self.console.is_terminal and step % 100 < 10:
            self.console.print(f"update {step}: {figures}")

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `jspec_train.loop.Watcher`."""
        shown = [name for name in values if "@" not in name]
        self.console.print(f"update {step}: " + "  ".join(f"{name} {values[name]:.3f}" for name in shown))


class JsonLog:
    """One JSON object per line in RUN/metrics.jsonl."""

    def __init__(self, folder: Path):
        """Appends to what a resumed run has already written."""
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / "metrics.jsonl"

    def on_update(self, step: int, values: Mapping[str, float]) -> None:
        """See `jspec_train.loop.Watcher`."""
        self._write(step, "train", values)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `jspec_train.loop.Watcher`."""
        self._write(step, "evaluation", values)

    def _write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, "kind": kind, **values}) + "\n")


class TensorBoard:
    """Event files in RUN/tensorboard, written by the package tensorboardX."""

    def __init__(self, folder: Path):
        """Raises ValueError if the package is missing."""
        self._writer = _module("tensorboardX", "tensorboard").SummaryWriter(str(folder / "tensorboard"))

    def on_update(self, step: int, values: Mapping[str, float]) -> None:
        """See `jspec_train.loop.Watcher`."""
        self._write("train", step, values)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `jspec_train.loop.Watcher`."""
        self._write("evaluation", step, values)

    def _write(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{kind}/{name}", value, step)
        self._writer.flush()

    def close(self) -> None:
        """Ends the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of the package wandb; a resumed run goes on under the id in RUN/wandb-id."""

    def __init__(self, folder: Path, project: str, recipe: Mapping[str, Any]):
        """Raises ValueError if the package is missing."""
        package = _module("wandb", "wandb")
        folder.mkdir(parents=True, exist_ok=True)
        record = folder / "wandb-id"
        known = record.read_text(encoding="utf-8").strip() if record.exists() else None
        self._run = package.init(
            project=project, config=dict(recipe), dir=str(folder), id=known, resume="allow"
        )
        record.write_text(self._run.id, encoding="utf-8")
        # Its own step may only rise, and a resumed run repeats the updates after the last checkpoint.
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def on_update(self, step: int, values: Mapping[str, float]) -> None:
        """See `jspec_train.loop.Watcher`."""
        self._log("train", step, values)

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """See `jspec_train.loop.Watcher`."""
        self._log("evaluation", step, values)

    def _log(self, kind: str, step: int, values: Mapping[str, float]) -> None:
        self._run.log({"update": step, **{f"{kind}/{name}": value for name, value in values.items()}})

    def close(self) -> None:
        """Sends what is left."""
        self._run.finish()


def _module(package: str, setting: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as missing:
        raise ValueError(
            f"{setting}: expected the package {package}, got none; pip install {package}, or switch it off"
        ) from missing
