"""Tempering in plain XLA: the definition, and what runs on CPU and GPU."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.vocabulary_row.choices import argmax, draw
from pallas_kernels.vocabulary_row.filters import Greatest, filter_floor
from pallas_kernels.vocabulary_row.tempered import Tempered


def temper(
    logits: Float[Array, "rows vocabulary"],
    temperature: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    coins: Float[Array, "rows"] | None,
    *,
    greatest_of: Greatest | None = None,
    drawn_of: Callable[[Array, Array], Array] = draw,
) -> Tempered:
    """See `pallas_kernels.vocabulary_row.api.temper`.

    Whoever splits the vocabulary over devices says how they find the greatest of a row and draw from it
    together; everything else the compiler splits.
    """
    sampled = temperature > 0
    best = jnp.max(logits, axis=1, keepdims=True)
    shifted = logits - jnp.where(jnp.isfinite(best), best, 0)
    scaled = jnp.where(sampled[:, None], shifted / jnp.where(sampled, temperature, 1)[:, None], logits)

    top_k = jnp.where(sampled, top_k, 0)
    top_p = jnp.where(sampled, top_p, 1)
    min_p = jnp.where(sampled, min_p, 0)
    floor = jax.lax.cond(
        jnp.any((top_k > 0) | (top_p < 1) | (min_p > 0)),
        lambda: jnp.where(
            sampled, filter_floor(scaled, top_k, top_p, min_p, greatest_of=greatest_of), -jnp.inf
        ),
        lambda: jnp.full(top_k.shape, -jnp.inf, jnp.float32),
    )
    weights = jnp.where(scaled >= floor[:, None], jnp.exp(scaled), 0)
    log_normaliser = jnp.where(sampled, jnp.log(jnp.sum(weights, axis=1)), 0)
    drawn = None
    if coins is not None:
        # NaN is not above a floor, but must not be skipped either.
        weights = jnp.where(jnp.isnan(scaled), scaled, weights)
        drawn = jax.lax.cond(
            jnp.all(sampled),
            lambda: drawn_of(weights, coins),
            lambda: jnp.where(sampled, drawn_of(weights, coins), argmax(logits)),
        )
    return Tempered(logits=scaled, log_normaliser=log_normaliser, floor=floor, drawn=drawn)
