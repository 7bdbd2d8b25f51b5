"""A GGUF file's key-value pairs alone, read in a fraction of the time that opening its tensors takes."""

import mmap
import struct
from pathlib import Path
from typing import Any

# struct's letter for each of the format's scalar types.
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


def read_gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys of a file as Python scalars, strings and lists.

    The gguf package's reader makes several NumPy views per list element: seconds for a tokenizer's lists.

    Raises:
      ValueError: no GGUF file of version 2 or 3, a type that the format does not have, or an early end.

    Source: GGUF specification (ggml, docs/gguf.md), versions 2 and 3, little-endian.
    """
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ValueError(f"{path}: expected a GGUF file, got other contents; check the path")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, 4)
            try:
                version, _, num_keys = cursor.scalar("I"), cursor.scalar("Q"), cursor.scalar("Q")
                if version not in (2, 3):
                    raise ValueError(f"expected GGUF version 2 or 3, little-endian, got {version}")
                return {cursor.string(): cursor.value(cursor.scalar("I")) for _ in range(num_keys)}
            except (struct.error, UnicodeDecodeError, ValueError) as error:
                raise ValueError(
                    f"{path}: expected readable metadata, got {error}; download the file again"
                ) from error


class _Cursor:
    """Reads one value after the other."""

    def __init__(self, data: mmap.mmap, at: int):
        self._data = data
        self._at = at

    def scalar(self, letter: str) -> Any:
        return self._scalars(letter, 1)[0]

    def string(self) -> str:
        start = self._at + 8
        (length,) = struct.unpack_from("<Q", self._data, self._at)
        if length > len(self._data) - start:
            raise ValueError("a string that ends after the file")
        self._at = start + length
        return self._data[start : self._at].decode()

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"a value of type {kind}")
        kind, length = self.scalar("I"), self.scalar("Q")
        if length > len(self._data) - self._at:  # every element takes a byte at least
            raise ValueError("a list that ends after the file")
        if kind in _SCALARS:
            return list(self._scalars(_SCALARS[kind], length))
        return [self.value(kind) for _ in range(length)]

    def _scalars(self, letter: str, count: int) -> tuple[Any, ...]:
        form = f"<{count}{letter}"
        values = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return values
