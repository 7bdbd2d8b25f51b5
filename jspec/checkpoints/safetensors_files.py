"""Safetensors files of a folder, single or sharded, as memory-mapped views.

The header is read here rather than by the safetensors library because what we need of it is the
byte ranges: to say how much of a truncated file is missing, and to hand out views of the mapped
file, of which each device then copies its own part only.

Source: the safetensors format, 8 bytes of header length, a JSON header, the data.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: dict[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
INTEGERS: dict[str, Any] = {"I64": np.int64, "I32": np.int32}
FLAGS: dict[str, Any] = {"BOOL": np.bool_}  # only read where a format has a mask
_HEADER_LIMIT = 100_000_000  # bytes; the format's own limit


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    file: Path
    dtype: str
    shape: tuple[int, ...]
    start: int  # from the beginning of the file
    end: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class SafetensorsFiles:
    """All tensors of a folder."""

    where: str
    entries: Mapping[str, _Entry]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: entry.shape for name, entry in self.entries.items()}

    def check_type(self, name: str, *, integer: bool = False) -> None:
        """Refuses a tensor that is not floating point (or not integer), before anything is read."""
        entry = self.entries[name]
        if integer and entry.dtype not in INTEGERS:
            raise ValueError(
                f"{entry.file}: expected tensor {name!r} as one of {', '.join(INTEGERS)}, got {entry.dtype}; "
                "it holds ids"
            )
        if not integer and entry.dtype not in DTYPES:
            raise ValueError(
                f"{entry.file}: expected tensor {name!r} as one of {', '.join(DTYPES)}, got {entry.dtype}; "
                "quantised checkpoints are not read"
            )

    def read(self, name: str) -> np.ndarray:
        """A view of the mapped file."""
        entry = self.entries[name]
        data = np.memmap(entry.file, np.uint8, "r", offset=entry.start, shape=(entry.end - entry.start,))
        return data.view((DTYPES | INTEGERS | FLAGS)[entry.dtype]).reshape(entry.shape)


def open_safetensors(folder: Path) -> SafetensorsFiles:
    """Reads the headers of `model.safetensors`, or of the files that the index names.

    Raises:
      ValueError: on a missing, truncated or corrupt file, or an index that the files do not bear out.
    """
    single, index = folder / SINGLE, folder / INDEX
    if single.is_file():
        return SafetensorsFiles(where=str(single), entries=_entries(single))
    if not index.is_file():
        raise ValueError(
            f"path: expected {SINGLE} or {INDEX} in {folder}, got neither; "
            "download the weights, or convert them to safetensors"
        )
    places = _weight_map(index)
    entries: dict[str, _Entry] = {}
    for file_name in sorted(set(places.values())):
        file = folder / file_name
        if not file.is_file():
            raise ValueError(f"{index}: expected the file {file_name} beside it, got none; download it")
        entries |= {name: entry for name, entry in _entries(file).items() if places.get(name) == file_name}
    for name, file_name in places.items():
        if name not in entries:
            raise ValueError(
                f"{index}: expected tensor {name!r} in {file_name}, got none; download both again"
            )
    return SafetensorsFiles(where=str(index), entries=entries)


def _weight_map(index: Path) -> dict[str, str]:
    try:
        places = json.loads(index.read_text())["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"{index}: expected JSON with a weight_map, got {error!r}; download it again"
        ) from error
    for name, file_name in places.items():
        if Path(file_name).name != file_name:
            raise ValueError(f"{index}: expected plain file names, got {file_name!r} for tensor {name!r}")
    return places


def _entries(file: Path) -> dict[str, _Entry]:
    size = file.stat().st_size
    with file.open("rb") as stream:
        length = int.from_bytes(stream.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(
                f"{file}: expected a safetensors header of {length} bytes, got a file of {size}; "
                "it is truncated or no safetensors file: download it again"
            )
        try:
            header = json.loads(stream.read(length))
            entries = {
                name: _entry(file, 8 + length, value)
                for name, value in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{file}: expected a safetensors header, got {error}; download it again"
            ) from error
    expected = 8 + length
    for entry in sorted(entries.values(), key=lambda entry: (entry.start, entry.end)):
        if entry.start != expected:
            raise ValueError(
                f"{file}: expected tensor data from byte {expected} on, got an entry at {entry.start}; "
                "the header is corrupt: download it again"
            )
        expected = entry.end
    if size != expected:
        raise ValueError(
            f"{file}: expected {expected} bytes, got {size}; it is truncated or damaged: download it again"
        )
    return entries


def _entry(file: Path, data_start: int, value: dict[str, Any]) -> _Entry:
    start, end = (int(offset) + data_start for offset in value["data_offsets"])
    shape = tuple(int(side) for side in value["shape"])
    dtype = str(value["dtype"])
    known = DTYPES | INTEGERS | FLAGS
    if dtype in known and math.prod(shape) * np.dtype(known[dtype]).itemsize != end - start:
        raise ValueError(f"{end - start} bytes for a {dtype} tensor of shape {list(shape)}")
    return _Entry(file=file, dtype=dtype, shape=shape, start=start, end=end)
