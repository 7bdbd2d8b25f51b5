"""A checkpoint's tensors under one name each, whatever prefix, alias or fused form it was written in."""

import dataclasses
from collections.abc import Callable, Mapping, Set

import numpy as np

from jspec.checkpoints.leaves import TensorFile
from jspec.targets.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class PlainTensors:
    """A `TensorFile` of the known tensors under their plain names, with nothing fused.

    What nobody knows keeps the name that it is stored under.
    """

    file: TensorFile
    places: Mapping[str, tuple[str, slice]]  # name -> tensor in the file and its rows
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(
        cls, file: TensorFile, decoder: DecoderConfig, known: Set[str], rename: Callable[[str], str]
    ) -> "PlainTensors":
        """The tensors of an open checkpoint.

        Args:
          file: the checkpoint.
          decoder: sizes of the layers, to cut fused tensors.
          known: plain names.
          rename: a stored name to a plain one.

        Raises:
          ValueError: two of one name, or a fused one that does not have the rows of its parts.
        """
        query, key = decoder.num_heads * decoder.head_size, decoder.num_kv_heads * decoder.head_size
        parts = {
            "qkv_proj": (("q_proj", query), ("k_proj", key), ("v_proj", key)),
            "gate_up_proj": (
                ("gate_proj", decoder.intermediate_size),
                ("up_proj", decoder.intermediate_size),
            ),
        }
        places: dict[str, tuple[str, slice]] = {}
        shapes: dict[str, tuple[int, ...]] = {}

        def add(name: str, stored: str, rows: slice, shape: tuple[int, ...]) -> None:
            if name in places:
                raise ValueError(
                    f"{file.where}: expected one tensor for {name!r}, got {places[name][0]!r} and {stored!r}"
                )
            places[name], shapes[name] = (stored, rows), shape

        for stored, shape in file.shapes.items():
            name = rename(stored)
            owner, _, last = name.rpartition(".")[0].rpartition(".")
            names = [f"{owner}.{part}.{name.rpartition('.')[2]}" for part, _ in parts.get(last, ())]
            if not names or not known >= set(names):
                add(name if name in known else stored, stored, slice(None), shape)
                continue
            total = sum(rows for _, rows in parts[last])
            if not shape or shape[0] != total:
                inside = ", ".join(f"{part} {rows}" for part, rows in parts[last])
                raise ValueError(
                    f"{file.where}: expected {total} rows in tensor {stored!r} ({inside}), "
                    f"got shape {list(shape)}; config and weights do not belong together"
                )
            start = 0
            for name, (_, rows) in zip(names, parts[last], strict=True):
                add(name, stored, slice(start, start + rows), (rows, *shape[1:]))
                start += rows
        return cls(file, places, shapes)

    @property
    def where(self) -> str:
        """See `TensorFile`, as for all below."""
        return self.file.where

    def check_type(self, name: str, *, integer: bool = False) -> None:
        """Refuses what cannot be read."""
        self.file.check_type(self.places[name][0], integer=integer)

    def read(self, name: str) -> np.ndarray:
        """The tensor's values."""
        stored, rows = self.places[name]
        return self.file.read(stored)[rows]
