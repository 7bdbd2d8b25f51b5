"""What libtpu makes of an update of a Qwen3-8B's DFlash drafter on eight chips that are not here."""

from compile_checks import compiled, needs_libtpu

from jspec_train.shapes import COMPILED

pytestmark = needs_libtpu


def test_an_update_fits_on_two_by_four_chips():
    (name,) = COMPILED
    found = compiled("jspec_train.shapes", (name,), generations=("v6e",))[name]["v6e"]
    held = found.argument_bytes + found.output_bytes - found.aliased_bytes + found.temporary_bytes
    assert held < 32 * 2**30
    # Masters and two moments of 1.05e9 parameters, a half on each device along `data`, updated in place.
    assert found.aliased_bytes > 6e9
    assert "all-to-all" not in found.collectives
    assert found.collective_bytes < 8e9  # measured 6.4: the weights gathered, their gradients summed
