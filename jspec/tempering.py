"""Tempering on a mesh or without one."""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from jspec.sharding import on_every_device
from pallas_kernels.vocabulary_row import api
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

    On a mesh of several devices in plain XLA: there the vocabulary may be split, and a kernel would have to gather
    whole rows on every device.
    """
    settings = (temperature, top_k, top_p, min_p)
    arguments = (logits, *settings) if coins is None else (logits, *settings, coins)
    if jax.sharding.get_abstract_mesh().size > 1:
        return api.temper(*arguments, implementation="xla")
    return on_every_device(api.temper, in_specs=PartitionSpec(), out_specs=PartitionSpec())(*arguments)
