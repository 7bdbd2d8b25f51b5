"""Tempering on a mesh or without one."""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jspec.sharding import on_every_device
from jspec.vocabulary import draw, largest
from pallas_kernels.vocabulary_row import api, reference
from pallas_kernels.vocabulary_row.tempered import Tempered


def temper(
    logits: Float[Array, "rows vocabulary"],
    temperature: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    coins: Float[Array, "rows"] | None = None,
) -> Tempered:
    """See `pallas_kernels.vocabulary_row.api.temper`.

    On several devices in plain XLA, with the choices over a split vocabulary: a kernel would have to gather
    whole rows on every device.
    """
    settings = (temperature, top_k, top_p, min_p)
    if jax.sharding.get_abstract_mesh().size > 1:
        return reference.temper(logits, *settings, coins, greatest_of=_greatest, drawn_of=draw)
    arguments = (logits, *settings) if coins is None else (logits, *settings, coins)
    return on_every_device(api.temper, in_specs=PartitionSpec(), out_specs=PartitionSpec())(*arguments)


def _greatest(logits: Float[Array, "rows vocabulary"], count: int) -> Float[Array, "rows count"]:
    return largest(logits, count)[0]
