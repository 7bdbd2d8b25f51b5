"""The few texts that a check looks at: tokens, freshly captured features, and anchors in their answers."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from jspec.capture import BUCKETS, Capture, capture_one
from jspec.checkpoints.target import LoadedTarget
from jspec.features import check_names
from jspec.objectives.batch import TrainBatch
from jspec.objectives.blocks import Blocks
from jspec_train.data.batches import Samples
from jspec_train.decoding import spread
from jspec_train.sample import Sample

_ROUNDED = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Texts:
    """Rows of one text each, cut behind the last block that is looked at."""

    samples: tuple[Sample, ...]  # cut
    states: dict[str, np.ndarray]  # feature name -> float32 [rows, tokens, hidden]
    batch: TrainBatch  # features: those that the drafter reads
    blocks: Blocks

    def features(self, names: Sequence[str]) -> jnp.ndarray:
        """[rows, tokens, width] of captured states side by side."""
        return jnp.asarray(np.concatenate([self.states[name] for name in names], axis=2))


def anchors_of(sample: Sample, *, block_size: int, tokens: int, limit: int) -> np.ndarray:
    """The first `tokens` places of a text where a block may start: an answer's token that another follows.

    Args:
      sample: the text.
      block_size: of the drafter.
      tokens: places wanted.
      limit: tokens that drafter and target can place; the whole block has to fit.
    """
    mask = sample.loss_mask
    places = np.flatnonzero(mask[:-1] & mask[1:])
    return places[(places >= 1) & (places + block_size <= limit)][:tokens].astype(np.int32)


def choose_samples(
    source: Samples, *, count: int, block_size: int, tokens: int, limit: int
) -> tuple[Sample, ...]:
    """Up to `count` samples with anchors, evenly from all over the data, cut behind what is looked at."""
    chosen: list[Sample] = []
    stride = max(len(source) // (2 * count), 1)  # twice as many as needed, as some may be unusable
    for index in range(0, len(source), stride):
        sample = source[index]
        anchors = anchors_of(sample, block_size=block_size, tokens=tokens, limit=limit)
        if anchors.size:
            chosen.append(cut(sample, int(anchors[-1]) + block_size + 1))
    return tuple(chosen[i] for i in spread(len(chosen), count))


def cut(sample: Sample, length: int) -> Sample:
    """The beginning of a sample."""
    features = None if sample.features is None else sample.features[:length]
    return dataclasses.replace(
        sample, ids=sample.ids[:length], loss_mask=sample.loss_mask[:length], features=features
    )


def random_samples(vocab_size: int, *, count: int, length: int) -> tuple[Sample, ...]:
    """Texts without sense, for what can be compared on any."""
    rng = np.random.default_rng(0)
    return tuple(
        Sample(
            id=f"random {i}",
            ids=rng.integers(0, vocab_size, length, np.int32),
            loss_mask=np.ones(length, np.bool_),
        )
        for i in range(count)
    )


def read_texts(
    loaded: LoadedTarget,
    samples: Sequence[Sample],
    names: Sequence[str],
    *,
    extra: Sequence[str] = (),
    block_size: int,
    tokens: int,
    limit: int,
) -> Texts:
    """Captures the features of samples.

    Args:
      loaded: the target.
      samples: the texts.
      names: features of the batch, in order.
      extra: further states to capture.
      block_size: of the drafter.
      tokens: anchors per text; fewer where the answer is shorter.
      limit: see `anchors_of`.

    Raises:
      ValueError: the target has no such state.
    """
    wanted = tuple(dict.fromkeys((*names, *extra)))
    check_names(wanted, loaded.target.num_layers)
    lengths = np.asarray([sample.ids.size for sample in samples], np.int32)
    size = -(-int(lengths.max()) // _ROUNDED) * _ROUNDED
    if size > BUCKETS[-1]:
        size = -(-size // BUCKETS[-1]) * BUCKETS[-1]
    capture = Capture(target=loaded.target, names=wanted, dtype="float32", buckets=(min(size, BUCKETS[-1]),))
    ids = np.zeros((len(samples), size), np.int32)
    mask = np.zeros(ids.shape, np.bool_)
    anchors = np.zeros((len(samples), tokens), np.int32)
    keep = np.zeros(anchors.shape, np.bool_)
    for row, sample in enumerate(samples):
        ids[row, : lengths[row]], mask[row, : lengths[row]] = sample.ids, sample.loss_mask
        places = anchors_of(sample, block_size=block_size, tokens=tokens, limit=limit)
        anchors[row, : places.size], keep[row, : places.size] = places, True
    rows = [
        np.asarray(capture_one(capture, loaded.params, row, length))
        for row, length in zip(ids, lengths, strict=True)
    ]
    parts = np.split(np.stack(rows), len(wanted), axis=2)
    states = dict(zip(wanted, parts, strict=True))
    index = np.broadcast_to(np.arange(size, dtype=np.int32), ids.shape)
    inside = index < lengths[:, None]
    return Texts(
        samples=tuple(samples),
        states=states,
        batch=TrainBatch(
            ids=jnp.asarray(ids),
            loss_mask=jnp.asarray(mask),
            segments=jnp.asarray(inside, jnp.int32),
            positions=jnp.asarray(np.where(inside, index, 0)),
            features=jnp.asarray(np.concatenate([states[name] for name in names], axis=2)),
        ),
        blocks=Blocks(anchors=jnp.asarray(anchors), keep=jnp.asarray(keep)),
    )
