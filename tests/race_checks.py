"""Whether a kernel raced in TPU interpret mode, which by itself only prints or logs that."""

import jax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call  # no public name leads there


def assert_no_race(results) -> None:
    """To be called with the results of a kernel whose InterpretParams detect races, before the next kernel runs."""
    jax.block_until_ready(results)
    assert not interpret_pallas_call.races.races_found
