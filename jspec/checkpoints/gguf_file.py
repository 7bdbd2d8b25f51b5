"""GGUF files: metadata by key, tensors dequantised one at a time. Needs the `gguf` package."""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufFile:
    """An open GGUF file; nothing of its tensors is in memory yet."""

    where: str
    reader: Any  # gguf.GGUFReader
    tensors: Mapping[str, Any]  # gguf.ReaderTensor by name

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes rows first: GGUF itself lists the fastest axis first."""
        return {
            name: tuple(int(side) for side in reversed(tensor.shape)) for name, tensor in self.tensors.items()
        }

    @property
    def keys(self) -> tuple[str, ...]:
        """All metadata keys."""
        return tuple(self.reader.fields)

    def value(self, key: str) -> Any:
        """A metadata value as Python scalar, string or list; None if there is no such key."""
        field = self.reader.get_field(key)
        return None if field is None else field.contents()

    def check_type(self, name: str) -> None:
        """Refuses a quantisation that the gguf package cannot undo, or integers."""
        import gguf

        kind = self.tensors[name].tensor_type
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

        tensor = self.tensors[name]
        if tensor.tensor_type == gguf.GGMLQuantizationType.F64:
            return tensor.data
        return gguf.dequantize(tensor.data, tensor.tensor_type)


def open_gguf(path: Path) -> GgufFile:
    """Opens a GGUF file and checks that all of its tensors are there.

    Raises:
      ValueError: if the file is truncated, damaged, one of several, or no GGUF file.
    """
    import gguf

    try:
        reader = gguf.GGUFReader(path)
    except Exception as error:  # the reader checks nothing: a short file ends in any kind of error
        raise ValueError(
            f"{path}: expected a whole GGUF file, got {path.stat().st_size} bytes that end early or are "
            f"damaged ({error}); download it again"
        ) from error
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    for tensor in reader.tensors:
        if tensor.n_elements != math.prod(int(side) for side in tensor.shape):
            raise ValueError(f"{path}: expected tensor {tensor.name!r} whole, got less; download it again")
    file = GgufFile(where=str(path), reader=reader, tensors=tensors)
    parts = file.value("split.count")
    if parts not in (None, 0, 1):
        raise ValueError(f"{path}: expected one GGUF file, got part of {parts}; merge the parts first")
    return file
