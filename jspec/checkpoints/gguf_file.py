"""GGUF files: metadata by key, tensors dequantised one at a time. Needs the `gguf` package."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jspec.checkpoints.gguf_metadata import TensorInfo, read_gguf_header


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Entry:
    kind: Any  # gguf.GGMLQuantizationType
    shape: tuple[int, ...]  # rows first: GGUF itself lists the fastest axis first
    start: int  # from the beginning of the file
    num_bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufFile:
    """An open GGUF file; nothing of its tensors is in memory yet."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, _Entry]

    @property
    def where(self) -> str:
        """The path, to name it in errors."""
        return str(self.path)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor, rows first."""
        return {name: entry.shape for name, entry in self.tensors.items()}

    @property
    def keys(self) -> tuple[str, ...]:
        """All metadata keys."""
        return tuple(self.metadata)

    def value(self, key: str) -> Any:
        """A metadata value as Python scalar, string or list; None if there is no such key."""
        return self.metadata.get(key)

    def check_type(self, name: str, *, integer: bool = False) -> None:
        """Refuses a quantisation that the gguf package cannot undo, or integers."""
        import gguf

        if integer:
            raise ValueError(f"{self.where}: expected tensor {name!r} of ids, got a file of weights alone")
        kind = self.tensors[name].kind
        if kind == gguf.GGMLQuantizationType.F64:
            return
        try:
            gguf.dequantize(np.zeros(gguf.GGML_QUANT_SIZES[kind][1], np.uint8), kind)  # one empty block
        except NotImplementedError as error:
            raise ValueError(
                f"{self.where}: expected tensor {name!r} in a type that the gguf package dequantises, "
                f"got {kind.name}; use another quantisation"
            ) from error

    def read(self, name: str) -> np.ndarray:
        """The tensor's values; float32 if it was quantised."""
        import gguf

        entry = self.tensors[name]
        data = np.memmap(self.path, np.uint8, "r", offset=entry.start, shape=(entry.num_bytes,))
        if entry.kind == gguf.GGMLQuantizationType.F64:
            return data.view(np.float64).reshape(entry.shape)
        return gguf.dequantize(data.reshape(*entry.shape[:-1], -1), entry.kind)


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file and checks that all of its tensors are there.

    Raises:
      ValueError: if the file is truncated, damaged, one of several, or no GGUF file.
    """
    size = path.stat().st_size
    try:
        header = read_gguf_header(path)
        alignment = header.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(f"expected general.alignment as a power of two, got {alignment!r}")
        start = -(-header.end // alignment) * alignment
        tensors = {name: _entry(name, info, start, size) for name, info in header.tensors.items()}
    except ValueError as error:
        raise ValueError(
            f"{path}: expected a whole GGUF file, got {size} bytes that end early or are "
            f"damaged ({error}); download it again"
        ) from error
    file = GgufFile(path=path, metadata=header.metadata, tensors=tensors)
    parts = file.value("split.count")
    if parts not in (None, 0, 1):
        raise ValueError(f"{path}: expected one GGUF file, got part of {parts}; merge the parts first")
    return file


def _entry(name: str, info: TensorInfo, data_start: int, size: int) -> _Entry:
    import gguf

    kind = gguf.GGMLQuantizationType(info.kind)  # a ValueError if there is none
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    if not info.sides or info.sides[0] % block:
        raise ValueError(f"tensor {name!r} of sides {info.sides} in blocks of {block}")
    start, num_bytes = data_start + info.offset, math.prod(info.sides) // block * block_bytes
    if start + num_bytes > size:
        raise ValueError(f"tensor {name!r} that ends at byte {start + num_bytes}")
    return _Entry(kind=kind, shape=info.sides[::-1], start=start, num_bytes=num_bytes)
