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
        assert program.temporary_bytes <= (2**22 if generation == "v5p" else 0), name
        new = shape.layers * shape.nodes * shape.kv_heads * 128 * itemsize
        assert program.largest_made <= new, name


def test_instruction_counts_are_those_of_the_table():
    check_table("commit", compiled(MODULE, COUNTED, listings=True))
