"""How well a drafter predicts when one thing about its input is changed."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.blocks import Blocks
from jspec.objectives.frozen import Tables
from jspec_train.check.method import CheckedMethod, Input

LEAST = 0.02  # gain in accuracy that accuses a change which shows the drafter nothing more


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows:
    """Of every drafted row of every block; arrays [texts, anchors, drafts]."""

    correct: np.ndarray  # bool: the best token is the label
    loss: np.ndarray  # cross-entropy in nats
    counted: np.ndarray  # bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Change:
    """How predictions change when the input does. Both are means over the same rows."""

    name: str
    least: float  # gain in accuracy that would accuse it
    accuracy: float
    accuracy_before: float
    error: float  # standard error of the difference of accuracies, over texts
    loss: float
    loss_before: float

    @property
    def gain(self) -> float:
        """Accuracy won."""
        return self.accuracy - self.accuracy_before

    @property
    def clear(self) -> bool:
        """Whether it is better by more than `least` and more than chance: three standard errors.

        Accuracy decides, as an overconfident drafter loses cross-entropy by anything that confuses it. The
        loss has to fall as well.
        """
        return self.gain > max(self.least, 3 * self.error) and self.loss < self.loss_before

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass:
    """A drafter and its target's tables, to try inputs on."""

    method: CheckedMethod
    params: Params
    tables: Tables

    def rows(self, batch: TrainBatch, blocks: Blocks, given: Input | None = None) -> Rows:
        """What it predicts.

        Args:
          batch: texts and the features to read.
          blocks: anchors.
          given: what differs; None = nothing.
        """
        given = Input() if given is None else given
        labels, counted = shifted_labels(batch, blocks, self.method.block_size, given.labels)
        found = self.method.predictions(self.params, self.tables, batch, blocks, jnp.asarray(labels), given)
        return Rows(
            correct=np.asarray(found.correct),
            loss=np.asarray(found.loss),
            counted=counted & np.asarray(found.known),
        )


def shifted_labels(
    batch: TrainBatch, blocks: Blocks, block_size: int, shift: int
) -> tuple[np.ndarray, np.ndarray]:
    """Labels [texts, anchors, drafts] at token anchor + j + shift, and where row j counts.

    A row counts under every shift or under none: tokens up to anchor + j + 1 are of the same answer.
    """
    ids, mask = np.asarray(batch.ids), np.asarray(batch.loss_mask)
    tokens = ids.shape[1]
    place = np.asarray(blocks.anchors)[:, :, None] + np.arange(1, block_size)
    row = np.arange(ids.shape[0])[:, None, None]
    supervised = (place + 1 < tokens) & mask[row, np.minimum(place + 1, tokens - 1)]
    supervised = np.logical_and.accumulate(supervised, axis=2)
    counted = supervised & mask[row, np.minimum(place, tokens - 1)] & np.asarray(blocks.keep)[:, :, None]
    return ids[row, np.clip(place + shift, 0, tokens - 1)], counted


def change(
    name: str, before: Rows, after: Rows, *, least: float = LEAST, position: int | None = None
) -> Change:
    """Compares two inputs on the rows that both count.

    Args:
      name: of the change.
      before: without it.
      after: with it.
      least: see `Change`.
      position: draft token, from 1, to look at; None = all.
    """
    counted = before.counted & after.counted
    if position is not None:
        counted = counted & (np.arange(1, counted.shape[2] + 1) == position)
    count = counted.sum(axis=(1, 2))  # by text
    total = max(int(count.sum()), 1)

    def mean(values: np.ndarray) -> float:
        return float(np.where(counted, values, 0).sum() / total)

    gained = np.where(counted, after.correct.astype(float) - before.correct, 0).sum(axis=(1, 2))
    spread = gained - count * gained.sum() / total
    texts = int((count > 0).sum())
    error = float("inf") if texts < 2 else float(np.sqrt((spread**2).sum() * texts / (texts - 1)) / total)
    return Change(
        name=name,
        least=least,
        accuracy=mean(after.correct),
        accuracy_before=mean(before.correct),
        error=error,
        loss=mean(after.loss),
        loss_before=mean(before.loss),
    )
