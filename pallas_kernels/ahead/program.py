"""What a compiled TPU program says about itself: memory, copies, collectives, instructions."""

import dataclasses
import math
import pathlib
import re
from typing import Any

_ELEMENT_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "bf16": 2, "f16": 2,
    "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
}  # fmt: skip
# Instructions whose result is an operand under another name, or is written in place.
_NO_MEMORY = {
    "parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "custom-call",
    "dynamic-update-slice", "optimization-barrier", "copy-done", "copy-start", "call",
}  # fmt: skip
_COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?[\w.-]+ = (\w+)\[([\d,]*)\]\S* ([\w-]+)\(")
_COLLECTIVE = re.compile(rf"^\s*(?:ROOT )?%?[\w.-]+ = (.*?) ({'|'.join(_COLLECTIVES)})(-start)?\(")
_ARRAY = re.compile(r"(\w+)\[([\d,]*)\]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """Compiler facts of one program; bytes are per device."""

    argument_bytes: int
    output_bytes: int
    aliased_bytes: int  # of the output that take donated arguments' memory
    temporary_bytes: int
    largest_made: int  # bytes of the largest array that an instruction makes, not counting writes in place
    collectives: dict[str, int]  # how many of each kind
    collective_bytes: int  # of what they return
    # As the compiler counts them: loops once, copies into fast memory as well, kernels as they declare
    # themselves.
    flops: float
    accessed_bytes: float
    instructions: int | None = None  # of all Mosaic kernels; None if they were not listed
    bundles: int | None = None  # of instructions that issue together


def facts(compiled: Any, dump: pathlib.Path | None = None) -> Program:
    """Reads a compiled program.

    Args:
      compiled: from `topology.compile_for`.
      dump: the folder that `topology.environment` was given, with the listings of this program alone.
    """
    text = compiled.as_text()
    memory = compiled.memory_analysis()
    costs = compiled.cost_analysis()
    listed = (None, None) if dump is None else count_instructions(dump)
    return Program(
        argument_bytes=memory.argument_size_in_bytes,
        output_bytes=memory.output_size_in_bytes,
        aliased_bytes=memory.alias_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        largest_made=max(made_bytes(text), default=0),
        collectives={
            name: count for name in _COLLECTIVES if (count := len(re.findall(rf" {name}(?:-start)?\(", text)))
        },
        collective_bytes=sum(collective_sizes(text)),
        flops=costs.get("flops", 0.0),
        accessed_bytes=costs.get("bytes accessed", 0.0),
        instructions=listed[0],
        bundles=listed[1],
    )


def made_bytes(text: str) -> list[int]:
    """Sizes of all arrays that a compiled program's instructions make, except those written in place.

    What happens inside a fusion makes no array.
    """
    fused = set(re.findall(r"calls=%?([\w.-]+)", text))
    sizes, inside = [], False
    for line in text.splitlines():
        if header := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            inside = header[1] in fused
        found = _INSTRUCTION.match(line)
        if found is None or inside:
            continue
        element, dims, operation = found.groups()
        if operation not in _NO_MEMORY and element in _ELEMENT_BYTES:
            sizes.append(_size(element, dims))
    return sizes


def collective_sizes(text: str) -> list[int]:
    """Bytes that each collective of a compiled program returns, on one device."""
    sizes = []
    for line in text.splitlines():
        found = _COLLECTIVE.match(line)
        if found is None:
            continue
        arrays = _ARRAY.findall(found[1])
        if found[3] and found[2] != "all-reduce":  # begun here, ended elsewhere: operands, results, its state
            arrays = [array for array in arrays if array != ("u32", "")]
            arrays = arrays[len(arrays) // 2 :]
        sizes.append(sum(_size(element, dims) for element, dims in arrays if element in _ELEMENT_BYTES))
    return sizes


def _size(element: str, dims: str) -> int:
    return math.prod(int(d) for d in dims.split(",") if d) * _ELEMENT_BYTES[element]


def count_instructions(dump: pathlib.Path) -> tuple[int, int]:
    """Instructions and bundles of the Mosaic kernels in libtpu's listings of final bundles.

    A bundle is what issues at once. Both are static: a loop counts once.
    """
    instructions = bundles = 0
    for listing in sorted(dump.glob("*final_bundles.txt")):
        text = listing.read_text()
        # Listings of XLA's own operations are named after them, those around the program after its phases.
        if "schedule-analysis" in listing.name or "-TLP-" in listing.name or " custom-call(" not in text:
            continue
        for line in text.splitlines():
            if re.match(r"\s*(0x[0-9a-f]+|0)\s[A-Z\d:> ]*\{", line):
                bundles += 1
                instructions += line.count(";;") + 1 if "%" in line else 0
    return instructions, bundles
