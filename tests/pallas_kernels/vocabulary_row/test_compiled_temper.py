"""What libtpu makes of tempering: in place, for TPUs that are not here."""

import pytest
from compile_checks import GENERATIONS, check_table, compiled, needs_libtpu

from pallas_kernels.vocabulary_row.shapes import COMPILED

MODULE = "pallas_kernels.vocabulary_row.shapes"
COUNTED = ("nodes", "plain")
OTHERS = tuple(name for name in COMPILED if name not in COUNTED)

pytestmark = needs_libtpu


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("names", [COUNTED, OTHERS], ids=["counted", "others"])
def test_rows_are_tempered_in_place(names, generation):
    for name, programs in compiled(MODULE, names, listings=names == COUNTED).items():
        program, shape = programs[generation], COMPILED[name]
        assert program.aliased_bytes >= 4 * shape.rows * shape.vocabulary  # rows are filled up to eights
        # Of each row's settings a few numbers are put together, and for a v5p moved to the chip.
        assert program.temporary_bytes <= 2**19, name
        assert program.largest_made <= 2**12, name


def test_instruction_counts_are_those_of_the_table():
    check_table("vocabulary_row", compiled(MODULE, COUNTED, listings=True))
