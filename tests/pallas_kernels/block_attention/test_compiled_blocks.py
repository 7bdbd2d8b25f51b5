"""What libtpu makes of attention of blocks, forward and backward: memory and size, for TPUs that are not here."""

import pytest
from compile_checks import GENERATIONS, check_table, compiled, needs_libtpu

from pallas_kernels.block_attention.shapes import COMPILED

MODULE, NAMES = "pallas_kernels.block_attention.shapes", tuple(COMPILED)

pytestmark = needs_libtpu


@pytest.mark.parametrize("generation", GENERATIONS)
def test_memory_is_that_of_the_operands_and_no_score_is_kept(generation):
    for name, programs in compiled(MODULE, NAMES, listings=True).items():
        program, shape = programs[generation], COMPILED[name]
        # Operands and gradients in the kernels' layout; small ones may be moved to the chip, which counts.
        assert program.temporary_bytes <= 2.5 * shape.operand_bytes + 2**24, name
        assert program.largest_made <= shape.operand_bytes, name
        if name == "qwen3 8b":
            assert program.temporary_bytes < shape.score_bytes / 16


def test_instruction_counts_are_those_of_the_table():
    check_table("block_attention", compiled(MODULE, NAMES, listings=True))
