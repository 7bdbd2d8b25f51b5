"""What libtpu makes of committing: in place, without a copy, for TPUs that are not here."""

import pytest
from compile_checks import GENERATIONS, check_table, compiled, needs_libtpu

from pallas_kernels.commit.shapes import COMPILED

MODULE = "pallas_kernels.commit.shapes"
COUNTED = ("round", "chunk")
OTHERS = tuple(name for name in COMPILED if name not in COUNTED)

pytestmark = needs_libtpu


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("names", [COUNTED, OTHERS], ids=["counted", "others"])
def test_the_pool_is_changed_in_place(names, generation):
    for name, programs in compiled(MODULE, names, listings=names == COUNTED).items():
        program, shape = programs[generation], COMPILED[name]
        tokens = shape.slots * shape.context * shape.layers
        itemsize = 4 if shape.dtype == "float32" else 2
        assert program.aliased_bytes >= 2 * tokens * shape.kv_heads * shape.head_size * itemsize
        assert program.output_bytes <= program.aliased_bytes + 2**12, name
        # Only the new rows of small heads are made in another layout, and for a v5p they are moved to the chip
        # ahead of the kernel, which counts as temporary: 3 heads of 64 as 4 of 128.
        small, entries = name == "small heads", shape.layers * shape.nodes * itemsize
        assert program.temporary_bytes <= (2 * entries * 4 * 128 if small and generation == "v5p" else 0), (
            name
        )
        assert program.largest_made <= (entries * shape.kv_heads * shape.head_size if small else 64), name


def test_instruction_counts_are_those_of_the_table():
    check_table("commit", compiled(MODULE, COUNTED, listings=True))
