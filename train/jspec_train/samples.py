"""Prepared samples on disk: a folder of array_record shards, written once and read at random.

```
FOLDER/dataset.json                what the samples are, how many, the report; written last
FOLDER/shard-00000.array_record    records in the order in which they were written
FOLDER/unfinished.json             only while the folder is being written: what is done so far
```
"""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import numpy as np
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordReader, ArrayRecordWriter

from jspec_train.sample import Sample, decode, encode
from jspec_train.sample_header import FORMAT, VERSION, Counts, Header, header_of, read_state, write_json

_DATASET, _UNFINISHED = "dataset.json", "unfinished.json"


class SampleWriter:
    """Writes a folder of samples; what was finished before an interruption is kept and continued.

    ```
    with SampleWriter(folder, header) as writer:
        for index in range(writer.counts.samples, len(source)):   # 0 in a fresh folder
            writer.write(make(source[index]))
        writer.finish(report)
    ```
    Shards appear complete or not at all. Where one input is not one sample, `write` and `mark` take a
    `cursor`: after an interruption `writer.cursor` is the last one that belongs to a finished shard.
    """

    def __init__(
        self, folder: str | Path, header: Header, *, shard_bytes: int = 1 << 28, shard_samples: int = 8192
    ):
        """Begins a folder, or continues one that was interrupted.

        Args:
          folder: made if it does not exist.
          header: what the samples share.
          shard_bytes: a shard is closed when it holds this many bytes of records ...
          shard_samples: ... or this many samples: what an interruption can cost.

        Raises:
          ValueError: the folder is finished, holds other files, or was begun with another header.
        """
        self.folder, self.header = Path(folder), header
        self.cursor: Any = None
        self.counts = Counts()
        self._limits = (shard_bytes, shard_samples)
        self._shards: list[dict[str, Any]] = []
        self._open: ArrayRecordWriter | None = None
        self._open_bytes = 0
        self._open_samples = 0
        self._next = (self.counts, self.cursor)  # as of the open shard's end
        self.folder.mkdir(parents=True, exist_ok=True)
        self._continue()

    def __enter__(self) -> "SampleWriter":
        """For `with`."""
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        """Keeps what is written, also on Ctrl-C: the open shard is closed short. No samples, no folder."""
        if self._open is not None:
            with contextlib.suppress(OSError):  # the reason for leaving is already on its way up
                self._close_shard()
        if not self._shards:  # nothing to continue
            with contextlib.suppress(OSError):
                (self.folder / _UNFINISHED).unlink()
                self.folder.rmdir()

    def write(self, sample: Sample, cursor: Any = None) -> None:
        """Appends a sample.

        Args:
          sample: with features exactly if the header is of kind "features".
          cursor: JSON; where the input stands once this sample is written.

        Raises:
          ValueError: the sample does not fit the header.
          OSError: the disk refuses, for instance because it is full; finished shards stay.
        """
        _check_fits(sample, self.header)
        record = encode(sample)
        shard = self._open or self._new_shard()
        self._open = shard
        try:
            shard.write(record)
        except RuntimeError as problem:
            raise self._refused(problem) from problem
        self._open_bytes += len(record)
        self._open_samples += 1
        self._next = (self._next[0].plus(sample), cursor)
        if self._open_bytes >= self._limits[0] or self._open_samples >= self._limits[1]:
            self._close_shard()

    def mark(self, cursor: Any) -> None:
        """Moves the cursor past inputs that gave no sample."""
        self._next = (self._next[0], cursor)

    def finish(self, report: Mapping[str, Any] | None = None) -> "SampleSource":
        """Closes the folder; from here on it can be read.

        Args:
          report: JSON, kept in dataset.json.

        Raises:
          ValueError: there is no sample.
          OSError: as in `write`.
        """
        if self._open is not None:
            self._close_shard()
        if not self.counts.samples:
            raise ValueError(
                f"{self.folder}: expected at least one sample, got none; look at what dropped them: {report}"
            )
        write_json(self.folder / _DATASET, self._state() | {"report": dict(report or {})})
        (self.folder / _UNFINISHED).unlink(missing_ok=True)
        return open_samples(self.folder)

    def _continue(self) -> None:
        names = {path.name for path in self.folder.iterdir()}
        if _DATASET in names:
            raise ValueError(
                f"{self.folder}: expected a new or an interrupted folder, got a finished one; use another"
            )
        if _UNFINISHED in names:
            state = read_state(self.folder / _UNFINISHED)
            if state["shards"]:
                header_of(state["header"]).check_same(self.header, self.folder)
            _check_shards(self.folder, state["shards"])
            self._shards, self.cursor = state["shards"], state["cursor"]
            self.counts = Counts(**state["counts"])
        elif names:
            raise ValueError(
                f"{self.folder}: expected an empty folder, got {sorted(names)[0]} in it; use another"
            )
        else:
            write_json(self.folder / _UNFINISHED, self._state() | {"cursor": self.cursor})
        # A shard that an interruption left between its last record and its entry is written again.
        for path in (*self.folder.glob("shard-*.array_record*"), *self.folder.glob("*.json.part")):
            if path.name not in {shard["name"] for shard in self._shards}:
                path.unlink()
        self._next = (self.counts, self.cursor)

    def _state(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "header": dataclasses.asdict(self.header),
            "counts": dataclasses.asdict(self.counts),
            "shards": self._shards,
        }

    def _shard_path(self) -> Path:
        return self.folder / f"shard-{len(self._shards):05d}.array_record"

    def _new_shard(self) -> ArrayRecordWriter:
        self._open_bytes = self._open_samples = 0
        # bfloat16 features hardly shrink, and unpacked the size can be told before.
        packing = "uncompressed" if self.header.kind == "features" else "zstd:3"
        try:
            return ArrayRecordWriter(f"{self._shard_path()}.part", f"group_size:1,{packing}")
        except RuntimeError as problem:
            raise self._refused(problem) from problem

    def _close_shard(self) -> None:
        path, part = self._shard_path(), Path(f"{self._shard_path()}.part")
        writer, self._open = self._open, None
        assert writer is not None
        try:
            writer.close()
        except RuntimeError as problem:
            part.unlink(missing_ok=True)
            raise self._refused(problem) from problem
        written = _num_records(part)
        if written != self._open_samples:
            part.unlink(missing_ok=True)
            raise self._refused(f"{written} of {self._open_samples} records arrived")
        os.replace(part, path)
        self._shards.append({"name": path.name, "samples": written, "bytes": path.stat().st_size})
        self.counts, self.cursor = self._next
        write_json(self.folder / _UNFINISHED, self._state() | {"cursor": self.cursor})

    def _refused(self, problem: object) -> OSError:
        return OSError(
            f"{self.folder}: expected room for {self._shard_path().name}, got {problem}; "
            "make room and run the same command again: finished shards are kept"
        )


class SampleSource:
    """Random access to a finished folder; what grain calls a data source."""

    def __init__(self, folder: Path, state: Mapping[str, Any]):
        """Called by `open_samples`."""
        self.folder = folder
        self.header = self._stored = header_of(state["header"])
        self.counts = Counts(**state["counts"])
        self.report: Mapping[str, Any] = state["report"]
        self._records = ArrayRecordDataSource([str(folder / shard["name"]) for shard in state["shards"]])
        self._states: tuple[str, ...] | None = None  # of the stored ones, those that are handed out

    def select(self, names: Sequence[str]) -> "SampleSource":
        """The same samples with some of their states, in this order.

        Raises:
          ValueError: the samples have no features, or not one of these.
        """
        contract = self.header.features
        missing = [name for name in names if contract is None or name not in contract.names]
        if contract is None or missing:
            raise ValueError(
                f"features: expected {list(names)}, got {None if contract is None else list(contract.names)} in "
                f"{self.folder}; capture them again"
            )
        width = contract.width // len(contract.names) * len(names)
        chosen = copy.copy(self)
        chosen.header = dataclasses.replace(
            self.header, features=dataclasses.replace(contract, names=tuple(names), width=width)
        )
        chosen._stored, chosen._states = self._stored, tuple(names)
        return chosen

    def __len__(self) -> int:
        """Number of samples."""
        return len(self._records)

    def __getitem__(self, index: SupportsIndex) -> Sample:
        """The sample that was written as number `index`.

        Raises:
          IndexError: there are not that many.
          ValueError: the record is damaged.
        """
        index = index.__index__()
        if not 0 <= index < len(self):
            raise IndexError(f"index: expected 0 to {len(self) - 1}, got {index}")
        sample = decode(self._records[index])
        _check_fits(sample, self._stored)
        return sample if self._states is None else _selected(sample, self._stored, self._states)


def open_samples(folder: str | Path) -> SampleSource:
    """Opens a finished folder.

    Raises:
      FileNotFoundError: there is no such folder.
      ValueError: it is unfinished, of another program, or its shards are not the ones it was closed with.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"samples: expected a folder, got {folder}, which does not exist; run `jspec prepare` first"
        )
    if not (folder / _DATASET).is_file():
        if (folder / _UNFINISHED).is_file():
            raise ValueError(
                f"samples: expected a finished folder, got {folder}, which was interrupted; run the same command again to finish it"
            )
        raise ValueError(
            f"samples: expected a folder that `jspec prepare` or capture wrote, got {folder} without {_DATASET}; check the path"
        )
    state = read_state(folder / _DATASET)
    _check_shards(folder, state["shards"])
    strange = {path.name for path in folder.glob("*.array_record")} - {
        shard["name"] for shard in state["shards"]
    }
    if strange:
        raise ValueError(
            f"samples: expected the shards that {folder / _DATASET} lists, got also {sorted(strange)[0]}; folders cannot be mixed: remove it"
        )
    source = SampleSource(folder, state)
    if len(source) != source.counts.samples:
        raise ValueError(
            f"samples: expected {source.counts.samples} records in {folder}, got {len(source)}; prepare it again"
        )
    return source


def _selected(sample: Sample, stored: Header, names: Sequence[str]) -> Sample:
    assert sample.features is not None and stored.features is not None
    if tuple(names) == stored.features.names:
        return sample
    states = np.split(sample.features, len(stored.features.names), axis=1)
    wanted = [states[stored.features.names.index(name)] for name in names]
    return dataclasses.replace(sample, features=np.concatenate(wanted, axis=1))


def _check_fits(sample: Sample, header: Header) -> None:
    if sample.ids.size > header.max_length:
        raise ValueError(
            f"sample {sample.id}: expected at most {header.max_length} tokens, got {sample.ids.size}"
        )
    contract = header.features
    if contract is None:
        if sample.features is not None:
            raise ValueError(
                f"sample {sample.id}: expected no features in samples of kind 'samples', got some"
            )
        return
    wanted = f"{contract.dtype}[{sample.ids.size}, {contract.width}]"
    got = None if sample.features is None else f"{sample.features.dtype.name}{list(sample.features.shape)}"
    if got != wanted:
        raise ValueError(f"sample {sample.id}: expected features {wanted} as the header says, got {got}")


def _check_shards(folder: Path, shards: list[dict[str, Any]]) -> None:
    for shard in shards:
        path = folder / shard["name"]
        size = path.stat().st_size if path.is_file() else None
        if size != shard["bytes"]:
            raise ValueError(
                f"samples: expected {path} with {shard['bytes']} bytes, got {size or 'no such file'}; the copy is incomplete: copy or make the folder again"
            )


def _num_records(path: Path) -> int:
    reader = ArrayRecordReader(str(path))
    try:
        return reader.num_records()
    finally:
        reader.close()
