"""The header of a GGUF file: its key-value pairs, and where each tensor lies.

The gguf package's reader makes several NumPy views per list element: seconds for a tokenizer's lists.
"""

import dataclasses
import mmap
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

# struct's letter for each of the format's scalar types.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """A tensor as the header lists it."""

    sides: tuple[int, ...]  # fastest axis first
    kind: int  # ggml's number of its type
    offset: int  # of its first byte, from the beginning of the data


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufHeader:
    """What stands in front of the data."""

    metadata: dict[str, Any]  # Python scalars, strings and lists
    tensors: dict[str, TensorInfo]
    end: int  # bytes of the header; the data begins at the next multiple of `general.alignment`


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys of a file; see `read_gguf_header`."""
    return read_gguf_header(path).metadata


def read_gguf_header(path: Path) -> GgufHeader:
    """Reads all keys and the list of tensors; no byte of the data.

    Raises:
      ValueError: no GGUF file of version 2 or 3, a type that the format does not have, a name that is
        there twice, or an early end.

    Source: GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: expected a GGUF file, got other contents; check the path")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, 4)
            try:
                version, num_tensors, num_keys = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
                if version not in (2, 3):
                    raise ValueError(f"expected GGUF version 2 or 3, little-endian, got {version}")
                metadata = _named(cursor, num_keys, lambda: cursor.value(cursor.scalar("I")))
                tensors = _named(cursor, num_tensors, cursor.tensor)
                return GgufHeader(metadata=metadata, tensors=tensors, end=cursor.at)
            except (struct.error, UnicodeDecodeError, ValueError) as error:
                raise ValueError(
                    f"{path}: expected readable metadata, got {error}; download the file again"
                ) from error


def _named(cursor: "_Cursor", count: int, read: Callable[[], Any]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for _ in range(count):
        name = cursor.string()
        if name in values:
            raise ValueError(f"{name!r} twice")
        values[name] = read()
    return values


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap, at: int):
        self._data = data
        self.at = at

    def scalar(self, letter: str) -> Any:
        return self._scalars(letter, 1)[0]

    def string(self) -> str:
        start = self.at + 8
        (length,) = struct.unpack_from("<Q", self._data, self.at)
        if length > len(self._data) - start:
            raise ValueError("a string that ends after the file")
        self.at = start + length
        return self._data[start : self.at].decode()

    def tensor(self) -> TensorInfo:
        num_axes = self.scalar("I")
        if num_axes > len(self._data) - self.at:
            raise ValueError("a tensor's axes that end after the file")
        sides = self._scalars("Q", num_axes)
        return TensorInfo(sides=sides, kind=self.scalar("I"), offset=self.scalar("Q"))

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}")
        kind, length = self.scalar("I"), self.scalar("Q")
        if length > len(self._data) - self.at:  # every element takes a byte at least
            raise ValueError("a list that ends after the file")
        if kind in _SCALARS:
            return list(self._scalars(_SCALARS[kind], length))
        return [self.value(kind) for _ in range(length)]

    def _scalars(self, letter: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{letter}"
        values = struct.unpack_from(form, self._data, self.at)
        self.at += struct.calcsize(form)
        return values
