"""What libtpu makes of attention: memory, copies and size, for TPUs that are not here."""

import pytest
from compile_checks import GENERATIONS, check_table, compiled, needs_libtpu

from pallas_kernels.attention.shapes import COMPILED

MODULE = "pallas_kernels.attention.shapes"
BARS = ("chain", "tree")
OTHERS = tuple(name for name in COMPILED if name not in BARS)

pytestmark = needs_libtpu


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("names", [BARS, OTHERS], ids=["bars", "others"])
def test_no_memory_but_the_output_and_no_copy_of_the_pool(names, generation):
    for name, programs in compiled(MODULE, names, listings=names == BARS).items():
        program = programs[generation]
        # For a v5p, what XLA moves to the chip ahead of a kernel counts as temporary.
        assert program.temporary_bytes <= (2**20 if generation == "v5p" else 0), name
        assert program.largest_made <= 2**17, name


def test_a_tree_costs_no_more_code_than_a_chain():
    programs = compiled(MODULE, BARS, listings=True)
    for generation in GENERATIONS:
        chain, tree = (programs[name][generation].instructions for name in BARS)
        assert chain <= tree <= 1.1 * chain
    assert programs["tree"]["v6e"].bundles < 2_700


def test_instruction_counts_are_those_of_the_table():
    check_table("attention", compiled(MODULE, BARS, listings=True))
