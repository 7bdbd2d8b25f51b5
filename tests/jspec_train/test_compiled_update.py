"""What libtpu makes of an update of a Qwen3-8B's DFlash drafter on eight chips that are not here."""

from compile_checks import compiled, needs_libtpu

from jspec.shapes import DFLASH_QWEN3_8B
from jspec_train.shapes import COMPILED

pytestmark = needs_libtpu


def test_an_update_fits_on_two_by_four_chips():
    (name,) = COMPILED
    found = compiled("jspec_train.shapes", (name,), generations=("v6e",))[name]["v6e"]
    held = found.argument_bytes + found.output_bytes - found.aliased_bytes + found.temporary_bytes
    assert held < 32 * 2**30
    # Masters and two moments of 1.1e9 parameters, a half on each device along `data`, updated in place.
    assert found.aliased_bytes > 5e9
    assert DFLASH_QWEN3_8B.decoder.num_layers == 5
    assert set(found.collectives) <= {"all-reduce", "all-gather", "reduce-scatter"}, found.collectives
