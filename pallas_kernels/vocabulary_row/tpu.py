"""Tempering as a Mosaic kernel for TPU: a row comes to the chip once, and leaves once, divided by its temperature.

There, everything else is a pass over the copy on the chip. Nothing is sorted: a floor is searched between two
logits of the row that close in on it, first among the maxima of a thousand columns, then in the whole row.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from pallas_kernels.registers import padded_bytes
from pallas_kernels.vocabulary_row.tempered import Tempered

_ROWS = 8  # of a register
_WIDTH = 1024  # logits of a row taken at once

Measure = Callable[[jax.Array], jax.Array]  # what a logit adds to the sum that a filter limits


@functools.partial(jax.jit, static_argnames=("interpret",))
def temper(
    logits: Float[Array, "rows vocabulary"],
    temperature: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    coins: Float[Array, "rows"] | None = None,
    *,
    interpret: Any = False,
) -> Tempered:
    """See `pallas_kernels.vocabulary_row.api.temper`; `interpret` is that of `pallas_call`."""
    rows, vocabulary = logits.shape
    height, pieces = min(rows, _ROWS), pl.cdiv(vocabulary, _WIDTH)
    draws = coins is not None
    settings = jnp.stack([temperature, top_p, min_p, coins if draws else jnp.zeros_like(temperature)], axis=1)

    def block(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((height, width), lambda i: (i, 0))

    scratch = [
        pltpu.VMEM((pieces, height, _WIDTH), jnp.float32),
        pltpu.VMEM((1, height, _WIDTH), jnp.float32),
    ]
    if draws:
        scratch.append(pltpu.VMEM((pieces, height, 1), jnp.float32))
    whole = pltpu.VMEM((height, vocabulary), jnp.float32)
    scaled, numbers, drawn = pl.pallas_call(
        functools.partial(_kernel, draws=draws),
        name="temper",
        grid=(pl.cdiv(rows, height),),
        in_specs=[block(vocabulary), block(4), block(1)],
        out_specs=[block(vocabulary), block(2), block(1)],
        out_shape=[
            jax.ShapeDtypeStruct((rows, vocabulary), jnp.float32),
            jax.ShapeDtypeStruct((rows, 2), jnp.float32),
            jax.ShapeDtypeStruct((rows, 1), jnp.int32),
        ],
        scratch_shapes=scratch,
        # Interpret mode pads an aliased array to whole blocks, and fails.
        input_output_aliases={} if interpret and rows % height else {0: 0},
        compiler_params=pltpu.CompilerParams(
            vmem_limit_bytes=4 * padded_bytes(whole) + sum(padded_bytes(b) for b in scratch) + 4 * 2**20,
        ),
        cost_estimate=pl.CostEstimate(
            flops=32 * rows * vocabulary,
            transcendentals=2 * rows * vocabulary,
            bytes_accessed=8 * rows * vocabulary,
        ),
        interpret=interpret,
    )(logits, settings, top_k.astype(jnp.int32)[:, None])
    return Tempered(
        logits=scaled,
        log_normaliser=numbers[:, 0],
        floor=numbers[:, 1],
        drawn=drawn[:, 0] if draws else None,
    )


def _kernel(
    logits: Any,
    settings: Any,
    top_k: Any,
    scaled: Any,
    numbers: Any,
    drawn: Any,
    row: Any,
    maxima: Any,
    ends: Any = None,
    *,
    draws: bool,
) -> None:
    """Of `_ROWS` rows. `row` holds them in pieces, with -inf behind the vocabulary."""
    vocabulary = logits.shape[1]
    temperature, top_p, min_p, coins = (settings[:, i : i + 1] for i in range(4))
    sampled = temperature > 0
    best = _best(logits)
    shift = jnp.where(sampled & (jnp.abs(best) < jnp.inf), best, 0)
    divisor = jnp.where(sampled, temperature, 1)
    _fill(logits, row, lambda piece: (piece - shift) / divisor)
    _write(row, scaled)
    maxima[0] = _over_pieces(row, _lowest(row), jnp.maximum)

    k = jnp.where(sampled & (top_k[...] < vocabulary), top_k[...], 0)
    p = jnp.where(sampled, top_p, 1)
    m = jnp.where(sampled, min_p, 0)

    def filtered() -> jax.Array:
        lowest = jnp.full(best.shape, -jnp.inf)
        highest = jnp.max(maxima[0], axis=1, keepdims=True)
        kth = jax.lax.cond(
            _any(k > 0),
            lambda: _floor(row, maxima, _one, k.astype(jnp.float32), lowest, highest, k > 0),
            lambda: lowest,
        )

        def by_mass() -> jax.Array:
            total = jnp.sum(
                _over_pieces(row, jnp.zeros_like(row[0]), lambda so_far, x: so_far + _kept(x, kth)),
                1,
                keepdims=True,
            )
            return _floor(row, maxima, jnp.exp, p * total, kth, highest, p < 1)

        floor = jax.lax.cond(_any(p < 1), by_mass, lambda: kth)
        return jnp.maximum(floor, jnp.where(m > 0, jnp.log(m), -jnp.inf))

    floor = jax.lax.cond(_any((k > 0) | (p < 1) | (m > 0)), filtered, lambda: jnp.full(best.shape, -jnp.inf))
    total = _mass(row, floor, ends)
    numbers[:, 0:1] = jnp.where(sampled, jnp.log(total), 0)
    numbers[:, 1:2] = floor
    if draws:
        drawn[...] = jax.lax.cond(
            _any(sampled),
            lambda: _draw(row, floor, ends, total, coins),
            lambda: jnp.full(best.shape, -1, jnp.int32),
        )

        @pl.when(_any(~sampled))
        def _() -> None:
            drawn[...] = jnp.where(sampled, drawn[...], _best_id(row, best))


def _any(condition: jax.Array) -> jax.Array:
    return jnp.max(condition.astype(jnp.float32)) > 0


def _one(x: jax.Array) -> jax.Array:
    return jnp.ones_like(x)


def _lowest(row: Any) -> jax.Array:
    return jnp.full(row.shape[1:], -jnp.inf)


def _kept(x: jax.Array, floor: jax.Array) -> jax.Array:
    return jnp.where(x >= floor, jnp.exp(x), 0)


def _best(logits: Any) -> jax.Array:
    vocabulary = logits.shape[1]
    whole = vocabulary // _WIDTH
    best = jnp.full((logits.shape[0], 1), -jnp.inf)
    if whole:

        def step(i: jax.Array, so_far: jax.Array) -> jax.Array:
            return jnp.maximum(so_far, logits[:, pl.ds(pl.multiple_of(i * _WIDTH, _WIDTH), _WIDTH)])

        so_far = jax.lax.fori_loop(0, whole, step, jnp.full((logits.shape[0], _WIDTH), -jnp.inf))
        best = jnp.max(so_far, axis=1, keepdims=True)
    if vocabulary % _WIDTH:
        best = jnp.maximum(best, jnp.max(logits[:, whole * _WIDTH :], axis=1, keepdims=True))
    return best


def _fill(logits: Any, row: Any, change: Measure) -> None:
    height, vocabulary = logits.shape
    whole, rest = divmod(vocabulary, _WIDTH)

    def step(i: jax.Array, _: None) -> None:
        row[i] = change(logits[:, pl.ds(pl.multiple_of(i * _WIDTH, _WIDTH), _WIDTH)])

    jax.lax.fori_loop(0, whole, step, None)
    if rest:
        row[whole] = jnp.full((height, _WIDTH), -jnp.inf)
        row[whole, :, :rest] = change(logits[:, whole * _WIDTH :])


def _write(row: Any, scaled: Any) -> None:
    whole, rest = divmod(scaled.shape[1], _WIDTH)

    def step(i: jax.Array, _: None) -> None:
        scaled[:, pl.ds(pl.multiple_of(i * _WIDTH, _WIDTH), _WIDTH)] = row[i]

    jax.lax.fori_loop(0, whole, step, None)
    if rest:
        scaled[:, whole * _WIDTH :] = row[whole, :, :rest]


def _over_pieces(row: Any, start: Any, step: Callable[[Any, jax.Array], Any]) -> Any:
    return jax.lax.fori_loop(0, row.shape[0], lambda i, so_far: step(so_far, row[i]), start)


def _floor(
    row: Any,
    maxima: Any,
    measure: Measure,
    goal: jax.Array,
    low: jax.Array,
    high: jax.Array,
    wanted: jax.Array,
) -> jax.Array:
    """The least logit of each row, from low to high, above which the measures sum to less than the goal.

    What the maxima add up to is part of what the row does, so their floor is not above the row's.
    """
    low = _least(maxima, measure, goal, low, high, wanted)
    return jnp.where(wanted, _least(row, measure, goal, low, high, wanted), low)


def _least(
    row: Any, measure: Measure, goal: jax.Array, low: jax.Array, high: jax.Array, wanted: jax.Array
) -> jax.Array:
    """See `_floor`; `high` passes. Tried are in turn the lowest logit left and the middle between the ends."""
    wanted = wanted & (jnp.abs(high) < jnp.inf)

    def unfinished(carry: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        _, low, high = carry
        return _any(wanted & (low < high))

    def narrow(carry: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        number, low, high = carry
        middle = low / 2 + high / 2
        tried = jnp.where((number % 2 == 1) & (middle < high) & (middle >= low), middle, low)

        def step(so_far: tuple[jax.Array, ...], x: jax.Array) -> tuple[jax.Array, ...]:
            total, above, below = so_far
            greater = x > tried
            return (
                total + jnp.where(greater, measure(x), 0),
                jnp.minimum(above, jnp.where(greater, x, jnp.inf)),
                jnp.maximum(below, jnp.where(greater, -jnp.inf, x)),
            )

        start = jnp.zeros_like(row[0]), jnp.full(row.shape[1:], jnp.inf), _lowest(row)
        total, above, below = _over_pieces(row, start, step)
        passes = jnp.sum(total, axis=1, keepdims=True) < goal
        below, above = jnp.max(below, axis=1, keepdims=True), jnp.min(above, axis=1, keepdims=True)
        active = wanted & (low < high)
        return (
            number + 1,
            jnp.where(active & ~passes, above, low),
            jnp.where(active & passes, jnp.maximum(below, low), high),
        )

    _, low, _ = jax.lax.while_loop(unfinished, narrow, (jnp.int32(0), low, high))
    return low


def _mass(row: Any, floor: jax.Array, ends: Any) -> jax.Array:
    """Sum of the kept weights; with it, if `ends` is there, what they sum to at the end of each piece."""

    def step(i: jax.Array, total: jax.Array) -> jax.Array:
        x = row[i]
        weights = jnp.where(x < floor, 0, jnp.exp(x))  # NaN stays
        total = total + jnp.sum(weights, axis=1, keepdims=True)
        if ends is not None:
            ends[i] = total
        return total

    return jax.lax.fori_loop(0, row.shape[0], step, jnp.zeros_like(floor))


def _draw(row: Any, floor: jax.Array, ends: Any, total: jax.Array, coins: jax.Array) -> jax.Array:
    """See `pallas_kernels.vocabulary_row.choices.draw`; a block is a piece."""
    pieces, height, width = row.shape
    goal = coins * total

    def find(i: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        before, start, piece, found = carry
        end = ends[i]
        # The first piece past the goal; while there is none, the last one with weight.
        new = (end > before) & (found == 0)
        return (
            end,
            jnp.where(new, before, start),
            jnp.where(new, i, piece),
            jnp.where(new & (end > goal), 1, found),
        )

    zero, none = jnp.zeros_like(total), jnp.zeros(total.shape, jnp.int32)
    _, start, piece, _ = jax.lax.fori_loop(0, pieces, find, (zero, zero, none, none))
    number = jax.lax.broadcasted_iota(jnp.int32, (height, 1), 0)
    inside = jnp.zeros((height, width))
    for r in range(height):
        chosen = row[jnp.max(jnp.where(number == r, piece, 0))]
        inside = jnp.where(number == r, chosen, inside)
    weights = _kept(inside, floor)
    column = jax.lax.broadcasted_iota(jnp.int32, weights.shape, 1)
    sums, step = weights, 1
    while step < width:
        sums = sums + jnp.where(column >= step, pltpu.roll(sums, step, 1), 0)
        step *= 2
    weighty = weights > 0
    last = jnp.max(jnp.where(weighty, column, -1), axis=1, keepdims=True)
    first = jnp.min(jnp.where(weighty & (start + sums > goal), column, width), axis=1, keepdims=True)
    within = jnp.where(first < width, first, jnp.maximum(last, 0))
    return jnp.where((total > 0) & (total < jnp.inf), piece * width + within, -1)


def _best_id(row: Any, best: jax.Array) -> jax.Array:
    """See `pallas_kernels.vocabulary_row.choices.argmax`."""
    pieces, height, width = row.shape
    column = jax.lax.broadcasted_iota(jnp.int32, (height, width), 1)

    def step(i: jax.Array, so_far: jax.Array) -> jax.Array:
        x = row[i]
        found = jnp.where((x == best) & (x > -jnp.inf), i * width + column, pieces * width)
        return jnp.minimum(so_far, jnp.where(x != x, -1, found))

    start = jnp.full((height, width), pieces * width, jnp.int32)
    found = jnp.min(jax.lax.fori_loop(0, pieces, step, start), axis=1, keepdims=True)
    return jnp.where(found < pieces * width, found, -1)
