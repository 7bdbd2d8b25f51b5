"""Checkpoints of a run: the state, where the data stands, and the recipe that they belong to."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import checkpoint_managers as policies

from jspec_train.recipe import Recipe
from jspec_train.sample_header import write_json
from jspec_train.step import TrainState

_RECIPE = "recipe.json"
# Settings that may differ between the parts of a run: they change what is reported or kept, not what is learned.
_FREE = ("output", "evaluation", "checkpoints", "log_every", "tensorboard", "wandb")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Restored:
    """A checkpoint in memory."""

    state: TrainState
    data: Any  # state of the data iterator: its next batch is the one after the last that was trained on
    metrics: Mapping[str, float]


class Checkpoints:
    """The checkpoints in `RUN/checkpoints`, saved in the background; the last ones and the best are kept."""

    def __init__(self, folder: str | Path, recipe: Recipe, data: Mapping[str, Any], *, resume: bool):
        """Opens a run's folder.

        Args:
          folder: the run's output.
          recipe: of the run.
          data: identity of the training data; part of what must be the same.
          resume: continue what is there; otherwise nothing may be there.

        Raises:
          ValueError: there are checkpoints and `resume` is False, or they were made with other settings.
        """
        self.folder = Path(folder).absolute()
        contract = self.folder / _RECIPE
        made = _contract(recipe, data)
        if contract.exists():
            if not resume:
                raise ValueError(
                    f"output: expected a new folder, got {self.folder}, which holds a run; "
                    "pass --resume to continue it, or another output"
                )
            _check_same(json.loads(contract.read_text("utf-8")), made, self.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_json(contract, made)
        self._manager = _manager(self.folder, recipe.checkpoints.keep)

    def save(self, state: TrainState, data: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Begins to save; returns before it is on disk. A step that is saved already is left alone."""
        step = int(state.step)
        if step in self._manager.all_steps():
            return
        arguments = ocp.args.Composite(state=ocp.args.StandardSave(state), data=ocp.args.JsonSave(data))
        self._manager.save(
            step, args=arguments, metrics=None if metrics is None else dict(metrics), force=True
        )

    def restore(self, like: TrainState, step: int | None = None) -> Restored | None:
        """The last checkpoint, or the one of a step; None if there is none yet.

        Args:
          like: a state of the same shapes; what is restored lives on the same devices, whatever they were.
          step: updates done.
        """
        step = self._manager.latest_step() if step is None else step
        if step is None:
            return None
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), like)
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract), data=ocp.args.JsonRestore())
        restored = self._manager.restore(step, args=arguments)
        return Restored(state=restored["state"], data=restored["data"], metrics=self.metrics(step))

    def metrics(self, step: int) -> Mapping[str, float]:
        """What was measured at a step; empty if nothing was."""
        return self._manager.metrics(step) or {}

    def best_step(self) -> int | None:
        """The step with the greatest mean_commit_length; the last one where none was decoded."""
        measured = {
            step: _score(self.metrics(step)) for step in self._manager.all_steps() if self.metrics(step)
        }
        return (
            max(measured, key=lambda step: (measured[step], step))
            if measured
            else self._manager.latest_step()
        )

    def wait(self) -> None:
        """Returns when everything is on disk."""
        self._manager.wait_until_finished()

    def close(self) -> None:
        """Waits, and lets go of the folder."""
        self._manager.close()


def _manager(folder: Path, keep: int) -> ocp.CheckpointManager:
    best = policies.BestN(get_metric_fn=_score, n=1, keep_checkpoints_without_metrics=False)
    options = ocp.CheckpointManagerOptions(
        preservation_policy=policies.AnyPreservationPolicy([policies.LatestN(keep), best]),
        best_fn=_score,
        enable_async_checkpointing=True,
    )
    return ocp.CheckpointManager(folder / "checkpoints", options=options)


def _score(metrics: Mapping[str, float]) -> float:
    """Decoded acceptance decides; the training proxy only where nothing was decoded."""
    return metrics.get("mean_commit_length", -metrics.get("loss", 0.0))


def _contract(recipe: Recipe, data: Mapping[str, Any]) -> dict[str, Any]:
    values = recipe.model_dump(mode="json")
    return {key: value for key, value in values.items() if key not in _FREE} | {"training_data": dict(data)}


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], folder: Path) -> None:
    old, new = dict(_flat(before)), dict(_flat(now))
    for name in sorted({*old, *new}):
        if old.get(name) != new.get(name):
            raise ValueError(
                f"{name}: expected {old.get(name)!r} as the run in {folder} has it, got {new.get(name)!r}; "
                "resume with the recipe it was begun with, or start another run (training.warm_start keeps the weights)"
            )


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    flat: list[tuple[str, Any]] = []
    for key, value in values.items():
        flat += _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else [(f"{prefix}{key}", value)]
    return flat
