"""What libtpu makes of a whole round of a Qwen3-8B-shaped target with DFlash, for TPUs that are not here."""

import pytest
from compile_checks import compiled, needs_libtpu

from jspec.shapes import COMPILED

MODULE = "jspec.shapes"
HBM = {"v5e": 16 * 2**30, "v6e": 32 * 2**30, "v5p": 95 * 2**30, "v7x": 96 * 2**30}  # of a device
# One chip of v6e holds the model; the others share it. Every generation compiles the three programs once.
CASES = [
    *((name, "v6e") for name in COMPILED if " on " not in name),
    *((name, "v5e") for name in COMPILED if " on " in name),
    *((name, generation) for name in COMPILED if name.endswith("on 8") for generation in ("v5p", "v7x")),
]
# Measured 134, 128 and 533 MiB at most: settle holds several arrays of [rows, vocabulary].
TEMPORARY = {"propose": 192 * 2**20, "execute": 144 * 2**20, "settle": 640 * 2**20}
# Measured 23, 77 and 0.5 MB: hidden states behind each layer, and of settle's 128 rows a few numbers each.
EXCHANGED = {"propose": 32e6, "execute": 96e6, "settle": 2e6}

pytestmark = needs_libtpu


def program(name: str, generation: str):
    return compiled(MODULE, (name,), generations=(generation,))[name][generation]


@pytest.mark.parametrize(("name", "generation"), CASES)
def test_a_round_fits_and_copies_no_pool(name, generation):
    shape, found = COMPILED[name], program(name, generation)
    held = found.argument_bytes + found.output_bytes - found.aliased_bytes + found.temporary_bytes
    assert held < HBM[generation]
    assert found.temporary_bytes < TEMPORARY[shape.kind]
    pool = shape.pool_bytes // 2 // shape.tensor  # of keys, on one device
    assert found.largest_made < pool
    if shape.kind == "settle":
        assert found.aliased_bytes >= 2 * pool
    if shape.tensor == 1:
        assert not found.collectives
    else:  # choices over the vocabulary exchange candidates, never rows of logits
        assert set(found.collectives) <= {"all-reduce", "all-gather"}
        assert found.collective_bytes < EXCHANGED[shape.kind]
    # One sum behind attention, one behind the MLP, one for the vocabulary's rows of the embedding.
    if shape.kind == "execute":
        assert found.collectives == ({"all-reduce": 2 * shape.layers + 1} if shape.tensor > 1 else {})
