"""How well a drafter predicts when one thing about its input is changed."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash_net import DFlashConfig, DFlashNet, draft_logits
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.block_pass import training_hidden
from jspec.objectives.blocks import Blocks, block_targets
from jspec.objectives.frozen import DraftTables, Tables


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

    config: DFlashConfig
    params: Params
    tables: Tables

    def rows(
        self,
        batch: TrainBatch,
        blocks: Blocks,
        *,
        label_shift: int = 0,
        bound: int = 0,
        config: DFlashConfig | None = None,
    ) -> Rows:
        """What it predicts.

        Args:
          batch: texts and the features to read.
          blocks: anchors.
          label_shift: row j is asked for token anchor + j + label_shift.
          bound: features of so many more tokens are visible, from the anchor's on.
          config: to use instead of the drafter's.
        """
        config = self.config if config is None else config
        labels, counted = shifted_labels(batch, blocks, config.block_size, label_shift)
        correct, loss, known = _figures(
            config, self.params, self.tables, batch, blocks, jnp.asarray(labels), jnp.int32(bound)
        )
        counted = counted & np.asarray(known)
        return Rows(correct=np.asarray(correct), loss=np.asarray(loss), counted=counted)


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
    name: str, before: Rows, after: Rows, *, least: float = 0.02, position: int | None = None
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


def embedding_of(net: DFlashNet, tables: Tables) -> Callable[[Array], Array]:
    """The drafter's own embedding if it has one, else the target's."""
    own = net.embedding
    return tables.embed if own is None else lambda ids: jnp.take(own[...], ids, axis=0)


@functools.partial(jax.jit, static_argnames="config")
def _figures(
    config: DFlashConfig,
    params: Params,
    tables: Tables,
    batch: TrainBatch,
    blocks: Blocks,
    labels: Int[Array, "texts anchors drafts"],
    bound: Int[Array, ""],
) -> tuple[Array, Array, Array]:
    """(correct, loss, known) of every drafted row, one text at a time."""
    net = dflash_net(config, params)
    embed = embedding_of(net, tables)

    def one(text: tuple[TrainBatch, Blocks, Array]) -> tuple[Array, Array, Array]:
        batch, blocks, labels = jax.tree.map(lambda a: a[None], text)
        targets = block_targets(batch, blocks, block_size=config.block_size)
        # The training code with its bound moved: anchors further on, and the tokens moved with them, so
        # that only what is visible changes. Positions of the block are those of the real anchors.
        moved = dataclasses.replace(batch, ids=jnp.roll(batch.ids, bound, axis=1))
        further = dataclasses.replace(blocks, anchors=jnp.where(blocks.keep, blocks.anchors + bound, 0))
        hidden = training_hidden(net, embed, moved, further, targets)[0, :, 1:]
        logits = draft_logits(config, tables.logits(hidden.reshape(-1, hidden.shape[2])))
        columns = labels[0].reshape(-1)
        if config.draft_vocab_size is not None:
            assert isinstance(tables, DraftTables)
            columns = tables.columns[columns]
        gold = jnp.take_along_axis(logits, jnp.maximum(columns, 0)[:, None], axis=1)[:, 0]
        loss = jax.nn.logsumexp(logits, axis=1) - gold
        correct = jnp.argmax(logits, axis=1) == columns
        shape = labels.shape[1:]
        return correct.reshape(shape), loss.reshape(shape), (columns >= 0).reshape(shape)

    return jax.lax.map(one, (batch, blocks, labels))
