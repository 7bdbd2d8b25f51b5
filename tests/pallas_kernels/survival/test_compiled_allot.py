"""What libtpu makes of the allotment, for TPUs that are not here."""

import pytest
from compile_checks import GENERATIONS, check_table, compiled, needs_libtpu

from pallas_kernels.survival.shapes import COMPILED

MODULE, NAMES = "pallas_kernels.survival.shapes", tuple(COMPILED)

pytestmark = needs_libtpu


@pytest.mark.parametrize("generation", GENERATIONS)
def test_it_takes_no_memory(generation):
    for name, programs in compiled(MODULE, NAMES, listings=True).items():
        assert programs[generation].temporary_bytes == 0, name


def test_instruction_counts_are_those_of_the_table():
    check_table("survival", compiled(MODULE, NAMES, listings=True))
