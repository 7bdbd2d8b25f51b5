"""Batches of samples in a shuffled, endless and resumable order: grain's, from random access to the samples."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

import grain
import numpy as np

from jspec_train.sample import Sample


class Samples(Protocol):
    """Random access to samples: a `jspec_train.samples.SampleSource`, or a list."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def __getitem__(self, index: Any, /) -> Sample:
        """One of them."""
        ...


def batches(
    source: Samples,
    *,
    batch_size: int,
    max_length: int,
    seed: int,
    epochs: int | None = None,
    bucket: int = 64,
    pack: bool = False,
    shuffle: bool = True,
    drop_last: bool = True,
    shard: int = 0,
    num_shards: int = 1,
    threads: int = 2,
    prefetch: int = 2,
) -> grain.DatasetIterator[dict[str, Any]]:
    """An iterator over batches; `get_state()` and `set_state()` save and restore where it stands.

    A batch holds the arrays of `jspec.objectives.batch.TrainBatch` under their names ("features" if the
    samples have some), and "sample_ids": by row, the ids of its documents, none in a row of padding.

    The order is a function of the seed, the number of samples and these arguments, not of threads or time;
    each epoch has another. Epochs follow one another without a gap, so a batch may hold the end of one and
    the beginning of the next. A restored iterator goes on bit-equal, from the middle of an epoch as well.
    Threads read ahead: call `close()` on an iterator that is not read to its end.

    Args:
      source: the samples.
      batch_size: rows in a batch of this shard.
      max_length: tokens that a document, and with packing a row, may have.
      seed: of the shuffling, 0 to 2**32 - 1.
      epochs: how often each sample comes; None: without end.
      bucket: without packing, a row is one document, and the rows of a batch have the least multiple of
        this that holds the longest of them. With packing all rows have `max_length` tokens.
      pack: several documents in a row, one after the other, none cut (grain's first fit).
      shuffle: False keeps the order of the source.
      drop_last: whether to leave out what is less than a batch at the very end; otherwise rows of padding
        fill the last batch up.
      shard: which part of the samples this process takes, every `num_shards`-th in the common order ...
      num_shards: ... of how many. All shards give equally many batches.
      threads: that read samples.
      prefetch: batches made ahead, in a thread of their own; 0: none.

    Raises:
      ValueError: there are no samples, too few for one batch, or an argument out of range. A document
        longer than `max_length` raises when it comes.
    """
    _check(source, batch_size, epochs, pack, shard, num_shards)
    dataset = grain.MapDataset.source(source).seed(seed)  # type: ignore[arg-type]
    if shuffle:
        dataset = dataset.shuffle()
    dataset = dataset.repeat(epochs)
    if num_shards > 1:
        if epochs is not None:  # no shard may end before the others
            per_turn = num_shards * batch_size if drop_last else num_shards
            dataset = dataset[: len(dataset) // per_turn * per_turn]
        dataset = dataset[shard::num_shards]
    if epochs is not None and drop_last and not pack and len(dataset) < batch_size:
        raise ValueError(
            f"batch_size: expected at most {len(dataset)}, what {epochs} epochs of {len(source)} samples give "
            f"each of {num_shards} shards, got {batch_size}; lower it, or take more epochs or data"
        )
    read = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=2 * batch_size)
    rows = dataset.map(_Element(max_length)).to_iter_dataset(read)
    if pack:
        arrays = [name for name, value in _element(source[0]).items() if isinstance(value, np.ndarray)]
        rows = grain.experimental.FirstFitPackIterDataset(
            rows,
            length_struct=dict.fromkeys(arrays, max_length),
            num_packing_bins=batch_size,
            shuffle_bins=False,
            meta_features=("sample_id",),
        )
    collate = _PackedRows(batch_size) if pack else _Rows(batch_size, bucket)
    collated = rows.batch(batch_size, drop_remainder=drop_last, batch_fn=collate)
    if prefetch:
        collated = grain.experimental.ThreadPrefetchIterDataset(collated, prefetch_buffer_size=prefetch)
    return iter(collated)


def _check(
    source: Samples, batch_size: int, epochs: int | None, pack: bool, shard: int, num_shards: int
) -> None:
    if not len(source):
        raise ValueError("source: expected at least one sample, got none; prepare more data")
    if batch_size < 1:
        raise ValueError(f"batch_size: expected 1 or more, got {batch_size}")
    if not 0 <= shard < num_shards:
        raise ValueError(f"shard: expected 0 to {num_shards - 1}, got {shard}")
    if pack and num_shards > 1 and epochs is not None:
        raise ValueError(
            f"epochs: expected None for packed rows in {num_shards} shards, got {epochs}; shards would end "
            "after different numbers of batches: count updates instead"
        )


def _element(sample: Sample) -> dict[str, Any]:
    element = {"ids": sample.ids, "loss_mask": sample.loss_mask, "sample_id": sample.id}
    return element if sample.features is None else element | {"features": sample.features}


@dataclasses.dataclass(frozen=True)
class _Element:
    max_length: int

    def __call__(self, sample: Sample) -> dict[str, Any]:
        if sample.ids.size > self.max_length:
            raise ValueError(
                f"max_length: expected at least {sample.ids.size} for sample {sample.id}, got {self.max_length}; "
                "raise it, or prepare the data with that length"
            )
        return _element(sample)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Documents side by side, padded to the length of the batch."""

    batch_size: int
    bucket: int

    def __call__(self, elements: Sequence[dict[str, Any]]) -> dict[str, Any]:
        sizes = np.zeros(self.batch_size, np.int32)
        sizes[: len(elements)] = [element["ids"].size for element in elements]
        tokens = -(-int(sizes.max()) // self.bucket) * self.bucket
        batch: dict[str, Any] = {}
        for name, first in elements[0].items():
            if not isinstance(first, np.ndarray):
                continue
            batch[name] = np.zeros((self.batch_size, tokens, *first.shape[1:]), first.dtype)
            for row, element in enumerate(elements):
                batch[name][row, : sizes[row]] = element[name]
        index = np.arange(tokens, dtype=np.int32)[None]
        real = index < sizes[:, None]
        batch["segments"] = real.astype(np.int32)
        batch["positions"] = np.where(real, index, 0).astype(np.int32)
        missing = self.batch_size - len(elements)
        return batch | {
            "sample_ids": tuple((element["sample_id"],) for element in elements) + ((),) * missing
        }


@dataclasses.dataclass(frozen=True)
class _PackedRows:
    """Rows as grain packs them, under our names."""

    batch_size: int

    def __call__(self, elements: Sequence[dict[str, Any]]) -> dict[str, Any]:
        names = {
            "ids": "ids",
            "loss_mask": "loss_mask",
            "segments": "ids_segment_ids",
            "positions": "ids_positions",
        }
        if "features" in elements[0]:
            names["features"] = "features"
        missing = self.batch_size - len(elements)
        batch: dict[str, Any] = {}
        for name, theirs in names.items():
            array = np.stack([element[theirs] for element in elements])
            batch[name] = np.concatenate([array, np.zeros((missing, *array.shape[1:]), array.dtype)])
        return batch | {
            "sample_ids": tuple(tuple(element["sample_id"]) for element in elements) + ((),) * missing
        }
