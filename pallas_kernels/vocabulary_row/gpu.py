"""Tempering as a Mosaic kernel for NVIDIA GPUs from sm90 on: one warpgroup per row.

A row of a large vocabulary does not fit into shared memory. It is read twice as it came, for the best logit and to
divide it, and written once. That is all for greedy rows; of others without filters, the draw reads one piece more. A
filtered row is read again, divided, for each step of the search of its floor and once for the mass above it; with a few
rows in flight these later passes find it in the cache. The search is that of the TPU kernel.

It has not run on a GPU: the interpreter runs it, and XLA compiles it ahead of time for an H100.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.vocabulary_row.tempered import Tempered

_WIDTH = 2048  # logits of a row taken at once, 16 by each thread
_NOWHERE = 2**30  # above any id

Measure = Callable[[jax.Array], jax.Array]  # what a logit adds to the sum that a filter limits
# Over the pieces of a row: (step, start) to result.
Fold = Callable[[Callable[[Any, Any, jax.Array], Any], Any], Any]


def unsupported(logits: Float[Array, "rows vocabulary"]) -> str | None:
    """The error of a call that the kernel cannot do; None of one that it can."""
    if jax.__version_info__ < (0, 12):
        return f'implementation: expected jax 0.12 or newer for "gpu", got {jax.__version__}; use "xla"'
    if logits.dtype != jnp.float32:
        return f'logits: expected float32 for implementation="gpu", got {logits.dtype}; use "xla"'
    return None


@functools.partial(jax.jit, static_argnames=("interpret",))
def temper(
    logits: Float[Array, "rows vocabulary"],
    temperature: Float[Array, "rows"],
    top_k: Int[Array, "rows"],
    top_p: Float[Array, "rows"],
    min_p: Float[Array, "rows"],
    coins: Float[Array, "rows"] | None = None,
    *,
    interpret: Any = None,
) -> Tempered:
    """See `pallas_kernels.vocabulary_row.api.temper`; `interpret` is that of `plgpu.kernel`."""
    rows, vocabulary = logits.shape
    sampled = temperature > 0
    divisor = jnp.where(sampled, temperature, 1)
    limit = jnp.where(sampled & (top_k < vocabulary), top_k, 0).astype(jnp.float32)
    share = jnp.where(sampled, top_p, 1)
    passes = jnp.where(sampled & (min_p > 0), jnp.log(min_p), -jnp.inf)
    tossed = jnp.zeros_like(temperature) if coins is None else coins
    # A piece is never wider than the row.
    padded = jnp.pad(logits, ((0, 0), (0, max(0, _WIDTH - vocabulary))), constant_values=-jnp.inf)
    number = jax.ShapeDtypeStruct((rows,), jnp.float32)
    scaled, total, floor, drawn = plgpu.kernel(
        functools.partial(_kernel, draws=coins is not None),
        out_type=(
            jax.ShapeDtypeStruct(padded.shape, jnp.float32),
            number,
            number,
            jax.ShapeDtypeStruct((rows,), jnp.int32),
        ),
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
    )(padded, sampled.astype(jnp.int32), divisor, limit, share, passes, tossed)
    return Tempered(
        logits=scaled[:, :vocabulary],
        log_normaliser=jnp.where(sampled, jnp.log(total), 0),
        floor=floor,
        drawn=None if coins is None else drawn,
    )


def _kernel(
    logits: Any,
    sampled: Any,
    divisor: Any,
    limit: Any,
    share: Any,
    passes: Any,
    coins: Any,
    scaled: Any,
    totals: Any,
    floors: Any,
    drawn: Any,
    *,
    draws: bool,
) -> None:
    """Of one row. Each thread reads of `scaled` what it wrote itself."""
    row = jax.lax.axis_index("row")
    samples, k, p, m = sampled[row] == 1, limit[row], share[row], passes[row]
    pieces = pl.cdiv(logits.shape[1], _WIDTH)

    def start_of(i: Any) -> Any:
        # The last piece ends with the row, so it may begin inside the one before.
        return jnp.minimum(i * _WIDTH, logits.shape[1] - _WIDTH)

    def loaded(ref: Any, start: Any) -> jax.Array:
        return plgpu.load(  # pyright: ignore[reportCallIssue]
            ref.at[row, pl.ds(start, _WIDTH)], layout=_layout(_WIDTH), optimized=False
        )

    def own(i: Any, x: jax.Array) -> jax.Array:
        """-inf where the logit belongs to the piece before."""
        return jnp.where(_iota(_WIDTH) >= i * _WIDTH - start_of(i), x, -jnp.inf)

    def piece(ref: Any, i: Any) -> jax.Array:
        return own(i, loaded(ref, start_of(i)))

    def fold(ref: Any) -> Fold:
        return lambda step, start: jax.lax.fori_loop(0, pieces, lambda i, c: step(i, c, piece(ref, i)), start)

    best = jnp.max(fold(logits)(lambda i, so_far, x: jnp.maximum(so_far, x), _filled(-jnp.inf, _WIDTH)))
    shift = jnp.where(samples & (jnp.abs(best) < jnp.inf), best, 0.0)
    by = divisor[row]
    ends_width = pl.cdiv(pieces, 128) * 128

    def added(i: Any, so_far: tuple[Any, Any], x: jax.Array, floor: Any) -> tuple[Any, Any]:
        """Sum of the kept weights, and what they sum to at the end of each piece."""
        total, ends = so_far
        weights = jnp.where(x < floor, 0.0, jnp.exp(x))  # NaN stays
        total = total + jnp.sum(weights)
        return total, jnp.where(_iota(ends_width) >= i, total, ends)

    def divide(i: Any, carry: Any) -> Any:
        maxima, found, total, ends = carry
        start = start_of(i)
        whole = loaded(logits, start)
        x = own(i, whole)
        # What the piece before has too is written again, as the same numbers: a store cannot leave out any.
        divided = (whole - shift) / by
        scaled_here = scaled.at[row, pl.ds(start, _WIDTH)]
        plgpu.store(scaled_here, divided, optimized=False)  # pyright: ignore[reportAttributeAccessIssue]
        changed = own(i, divided)
        here = jnp.where((x == best) & (x > -jnp.inf), _iota(_WIDTH) + start, _NOWHERE)
        found = jnp.minimum(found, jnp.where(x != x, -1, here))
        total, ends = added(i, (total, ends), changed, -jnp.inf)
        return jnp.maximum(maxima, changed), found, total, ends

    nothing = jnp.float32(0), _filled(0.0, ends_width)
    start = _filled(-jnp.inf, _WIDTH), _filled(_NOWHERE, _WIDTH), *nothing
    maxima, found, total, ends = jax.lax.fori_loop(0, pieces, divide, start)
    best_id = jnp.min(found)
    best_id = jnp.where(best_id == _NOWHERE, -1, best_id)
    highest = jnp.max(maxima)
    over_row, over_maxima = fold(scaled), lambda step, start: step(0, start, maxima)

    def search(measure: Measure, goal: Any, low: Any) -> Any:
        # What the maxima add up to is part of what the row does, so their floor is not above the row's.
        low = _least(over_maxima, measure, goal, low, highest)
        return _least(over_row, measure, goal, low, highest)

    kth = jax.lax.cond(
        k > 0, lambda: search(jnp.ones_like, k, jnp.float32(-jnp.inf)), lambda: jnp.float32(-jnp.inf)
    )

    def by_mass() -> Any:
        mass = over_row(
            lambda i, so_far, x: so_far + jnp.where(x >= kth, jnp.exp(x), 0.0), _filled(0.0, _WIDTH)
        )
        return search(jnp.exp, p * jnp.sum(mass), kth)

    floor = jnp.maximum(jax.lax.cond(p < 1, by_mass, lambda: kth), m)
    total, ends = jax.lax.cond(
        floor > -jnp.inf,
        lambda: over_row(lambda i, carry, x: added(i, carry, x, floor), nothing),
        lambda: (total, ends),
    )
    totals[row] = total
    floors[row] = floor
    if draws:

        def draw() -> Any:
            goal = coins[row] * total
            number = _iota(ends_width)
            past = (ends > goal) | (ends >= total)  # the latter where rounding leaves none past the goal
            chosen = jnp.minimum(jnp.min(jnp.where(past, number, pieces - 1)), pieces - 1)
            before = jnp.max(jnp.where(number < chosen, ends, 0.0))
            x = piece(scaled, chosen)
            weights = jnp.where(x >= floor, jnp.exp(x), 0.0)
            within = _first_past(weights, goal - before)
            id_ = start_of(chosen) + within
            return jnp.where((total > 0) & (total < jnp.inf), id_, -1)

        drawn[row] = jax.lax.cond(samples, draw, lambda: best_id)
    else:
        drawn[row] = jnp.int32(-1)


def _layout(width: int) -> Any:
    # One number at a time, as rows of odd vocabularies begin anywhere.
    return plgpu.Layout.WG_STRIDED((width,), vec_size=1)  # pyright: ignore[reportCallIssue]


def _iota(width: int) -> jax.Array:
    return plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=_layout(width))


def _filled(value: int | float, width: int) -> jax.Array:
    dtype = jnp.int32 if isinstance(value, int) else jnp.float32
    return plgpu.layout_cast(jnp.full((width,), value, dtype), _layout(width))


def _least(over: Fold, measure: Measure, goal: Any, low: Any, high: Any) -> Any:
    """The least logit, from low to high, above which the measures sum to less than the goal; `high` passes.

    Tried are in turn the lowest logit left and the middle between the ends.
    """

    def narrow(carry: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        number, low, high = carry
        middle = low / 2 + high / 2
        tried = jnp.where(((number & 1) == 1) & (middle < high) & (middle >= low), middle, low)

        def step(i: Any, so_far: tuple[Any, ...], x: jax.Array) -> tuple[Any, ...]:
            total, above, below = so_far
            greater = x > tried
            return (
                total + jnp.where(greater, measure(x), 0.0),
                jnp.minimum(above, jnp.where(greater, x, jnp.inf)),
                jnp.maximum(below, jnp.where(greater, -jnp.inf, x)),
            )

        start = _filled(0.0, _WIDTH), _filled(jnp.inf, _WIDTH), _filled(-jnp.inf, _WIDTH)
        total, above, below = over(step, start)
        passes = jnp.sum(total) < goal
        above, below = jnp.min(above), jnp.max(below)
        return number + 1, jnp.where(passes, low, above), jnp.where(passes, jnp.maximum(below, low), high)

    def unfinished(carry: tuple[Any, Any, Any]) -> Any:
        _, low, high = carry
        return (low < high) & (jnp.abs(high) < jnp.inf)

    return jax.lax.while_loop(unfinished, narrow, (jnp.int32(0), low, high))[1]


def _first_past(weights: jax.Array, goal: Any) -> Any:
    """The first index whose cumulative weight exceeds the goal; the last with weight if rounding leaves none.

    Bisected: leaving out more of the non-negative weights never makes their sum greater.
    """
    number = _iota(_WIDTH)
    last = jnp.max(jnp.where(weights > 0, number, 0))

    def halve(_: Any, bracket: tuple[Any, Any]) -> tuple[Any, Any]:
        low, high = bracket  # past is in (low, high]
        middle = jax.lax.shift_right_arithmetic(low + high, 1)
        enough = jnp.sum(jnp.where(number <= middle, weights, 0.0)) > goal
        return jnp.where(enough, low, middle), jnp.where(enough, middle, high)

    steps = _WIDTH.bit_length()
    return jax.lax.fori_loop(0, steps, halve, (jnp.int32(-1), last))[1]
