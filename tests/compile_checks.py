"""Programs of a kernel, compiled for every TPU generation in a child, and the table of their instructions."""

import functools
import json
import pathlib

import pytest

from pallas_kernels.ahead.child import compile_in_child
from pallas_kernels.ahead.program import Program
from pallas_kernels.ahead.topology import TOPOLOGIES, library, library_version

# By version of libtpu, kernel, case and generation: instructions and bundles. benchmarks/instructions.py writes it.
TABLE = pathlib.Path(__file__).parent / "pallas_kernels" / "instructions.json"
GENERATIONS = tuple(TOPOLOGIES)
SLACK = 0.02  # of a count; code for another place in the file differs by less

needs_libtpu = pytest.mark.skipif(
    library() is None,
    reason="no libtpu: pip install 'jspec[tpu-aot]', or set TPU_LIBRARY_PATH to a libtpu.so",
)


@functools.cache
def compiled(
    module: str, names: tuple[str, ...], listings: bool = False, generations: tuple[str, ...] = GENERATIONS
) -> dict[str, dict[str, Program]]:
    """Once per test process."""
    return compile_in_child(module, names, generations, listings=listings)


def check_table(kernel: str, programs: dict[str, dict[str, Program]]) -> None:
    """Counts must be those of the table: more is a slower start and often a slower kernel, less is news."""
    recorded = json.loads(TABLE.read_text()).get(str(library_version()))
    if recorded is None:
        pytest.skip(
            f"no counts for libtpu {library_version()} in {TABLE.name}; benchmarks/instructions.py adds them"
        )
    for name, by_generation in programs.items():
        for generation, program in by_generation.items():
            instructions, bundles = recorded[kernel][name][generation]
            assert program.instructions == pytest.approx(instructions, rel=SLACK), (name, generation)
            assert program.bundles == pytest.approx(bundles, rel=SLACK), (name, generation)
