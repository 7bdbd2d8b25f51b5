"""The training loop: updates, logs, evaluations, checkpoints, and how it ends."""

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jspec.net import Params
from jspec.objectives.batch import TrainBatch, on_devices
from jspec.objectives.dspark import BINNED, calibration_error
from jspec.objectives.frozen import Tables
from jspec.objectives.terms import Terms, add
from jspec_train.checkpoints import Checkpoints
from jspec_train.interrupts import Interrupts
from jspec_train.step import StepReport, Trainer, TrainState

HostBatch = Mapping[str, Any]  # numpy arrays of a TrainBatch, and "sample_ids"


class BatchIterator(Protocol):
    """What grain's iterators are used for."""

    def __iter__(self) -> Iterator[HostBatch]: ...

    def __next__(self) -> HostBatch: ...

    def get_state(self) -> Any: ...

    def set_state(self, state: Any) -> None: ...


class Watcher(Protocol):
    """Who is told how the run goes."""

    def on_update(self, step: int, values: Mapping[str, float]) -> None:
        """After every `log_every` updates: means since the last time."""
        ...

    def on_evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """After an evaluation."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """A run, ready to start: functions, frozen arrays, and how often to do what."""

    trainer: Trainer
    target: Tables
    frozen: Params  # the drafter's leaves without a master
    total_steps: int
    accumulation: int
    log_every: int
    save_every: int
    evaluate_every: int
    evaluate: Callable[[TrainState], Mapping[str, float]] | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """How a run ended."""

    state: TrainState
    interrupted: bool


def train(
    job: Job,
    state: TrainState,
    batches: BatchIterator,
    checkpoints: Checkpoints,
    watchers: Sequence[Watcher] = (),
) -> Outcome:
    """Trains until `total_steps`, or until Ctrl-C, which saves.

    Args:
      job: what to do.
      state: to start from; its `step` says how many updates are done.
      batches: stands behind the last batch of that update.
      checkpoints: where to save.
      watchers: are told.

    Raises:
      FloatingPointError: a loss or gradient is not finite; names the samples. The state before it can be resumed.
      ValueError: the data ends before the last update.
    """
    update = jax.jit(job.trainer.update, donate_argnums=(0,))
    meter = _Meter()
    pending: _Pending | None = None
    step, position = int(state.step), batches.get_state()
    with Interrupts() as interrupts:
        while step < job.total_steps and not interrupts.requested:
            window = _window(batches, job.accumulation, step)
            position = batches.get_state()
            state, report = update(state, job.frozen, job.target, _on_devices(window, job.trainer))
            step += 1
            # The report of the update before is read while this one runs.
            if pending is not None:
                _read(pending, meter, job)
            pending = _Pending(step=step, report=report, window=window)
            due = [n for n in (job.log_every, job.save_every, job.evaluate_every) if step % n == 0]
            if not due and step < job.total_steps:
                continue
            _read(pending, meter, job)
            pending = None
            if step % job.log_every == 0 or step == job.total_steps:
                values = meter.take()
                for watcher in watchers:
                    watcher.on_update(step, values)
            metrics, begin = None, time.perf_counter()
            if job.evaluate is not None and (step % job.evaluate_every == 0 or step == job.total_steps):
                metrics = job.evaluate(state)
                for watcher in watchers:
                    watcher.on_evaluation(step, metrics)
            if metrics is not None or step % job.save_every == 0 or step == job.total_steps:
                checkpoints.save(state, position, metrics)
            meter.start += time.perf_counter() - begin
        if pending is not None:
            _read(pending, meter, job)
        if interrupts.requested:
            checkpoints.save(state, position)
    checkpoints.wait()
    return Outcome(state=state, interrupted=interrupts.requested and step < job.total_steps)


def loss_evaluation(
    trainer: Trainer, frozen: Params, target: Tables, batches: Sequence[HostBatch]
) -> Callable[[TrainState], dict[str, float]]:
    """A function to the held-out loss and metrics of a state, over the same anchors every time.

    Raises:
      ValueError: there is no batch.
    """
    if not batches:
        raise ValueError("validation: expected at least one batch, got none; give more validation data")
    evaluate = jax.jit(trainer.evaluate)

    def figures(state: TrainState) -> dict[str, float]:
        pieces = []
        for index, batch in enumerate(batches):
            key = jax.random.fold_in(jax.random.key(0), index)
            pieces.append(evaluate(state, frozen, target, _on_devices([batch], trainer)[0], key))
        return scalars(functools.reduce(add, pieces))

    return figures


def scalars(terms: Terms) -> dict[str, float]:
    """The loss and the mean of every metric; one that is counted per position has these, too.

    Of confidence by bin, the calibration error is told.
    """
    terms = jax.device_get(terms)
    values = {"loss": float(terms.numerator / terms.denominator)}
    metrics = dict(terms.metrics)
    binned = [metrics.pop(name) for name in BINNED if name in metrics]
    if binned and np.sum(binned[0][1]) > 0:
        values["calibration_error"] = float(calibration_error(terms))
    for name, (total, count) in metrics.items():
        if np.sum(count) > 0:
            values[name] = float(np.sum(total) / np.sum(count))
        for position in range(len(total) if np.ndim(total) else 0):
            if count[position] > 0:
                values[f"{name}@{position + 1}"] = float(total[position] / count[position])
    return values


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Pending:
    step: int
    report: StepReport
    window: Sequence[HostBatch]


class _Meter:
    """Sums what the updates report between two log lines."""

    def __init__(self):
        self.total: Terms | None = None
        self.norm = self.samples = self.updates = 0.0
        self.start = time.perf_counter()

    def put(self, report: StepReport, samples: int) -> None:
        self.total = report.terms if self.total is None else jax.tree.map(np.add, self.total, report.terms)
        self.norm += float(report.grad_norm)
        self.samples += samples
        self.updates += 1

    def take(self) -> dict[str, float]:
        assert self.total is not None
        seconds = time.perf_counter() - self.start
        values = scalars(self.total) | {
            "grad_norm": self.norm / self.updates,
            "samples_per_second": self.samples / seconds,
            "seconds_per_update": seconds / self.updates,
        }
        self.__init__()
        return values


def _window(batches: BatchIterator, count: int, step: int) -> list[HostBatch]:
    window = []
    for _ in range(count):
        try:
            window.append(next(batches))
        except StopIteration:
            raise ValueError(
                f"data: expected batches for another update, got an end after update {step}; lower max_steps or raise epochs"
            ) from None
    longest = max(batch["ids"].shape[1] for batch in window)
    return [_padded(batch, longest) for batch in window]


def _padded(batch: HostBatch, tokens: int) -> HostBatch:
    """Micro-batches of one update have one shape, so that there is one program per length, not per pair."""
    missing = tokens - batch["ids"].shape[1]
    if not missing:
        return batch
    padded = {}
    for name, array in batch.items():
        axes = [(0, 0), (0, missing)] + [(0, 0)] * (np.ndim(array) - 2)
        padded[name] = array if name == "sample_ids" else np.pad(array, axes)
    return padded


def _on_devices(window: Sequence[HostBatch], trainer: Trainer) -> list[TrainBatch]:
    rows = NamedSharding(trainer.mesh, PartitionSpec("data"))

    return [on_devices(batch, rows) for batch in window]


def _read(pending: _Pending, meter: _Meter, job: Job) -> None:
    report = jax.device_get(pending.report)
    if not bool(report.sound):
        ids = [name for batch in pending.window for name in _names(batch)]
        raise FloatingPointError(
            f"update {pending.step}: expected finite numbers, got loss {report.terms.numerator} and gradient norm "
            f"{report.grad_norm}; look at the samples {', '.join(ids)}. Nothing was changed by it: "
            "resume from the last checkpoint without them or with a lower learning rate"
        )
    meter.put(report, sum(len(_names(batch)) for batch in pending.window))


def _names(batch: HostBatch) -> list[str]:
    """Ids of the samples in a batch, those packed into one row included."""
    names = []
    for row in batch["sample_ids"]:
        names += [row] if isinstance(row, str) else list(row)
    return [str(name) for name in names if name]
