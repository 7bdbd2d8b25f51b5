"""Seconds per round over lanes, verified nodes, prompt chunk and context, on the machine that it runs on."""

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from jspec.buckets import Bucket
from jspec.engine import Engine
from jspec.hardware import hardware_name
from jspec.results import Counters
from jspec.schedule.costs import Cell, MeasuredCosts
from jspec.schedule.tables import lane_sweep
from jspec.session import Session
from jspec.settings import Settings

Kind = tuple[Bucket, int]  # and the committed tokens per lane


def profile(
    engine: Engine,
    *,
    dtype: str,
    context: int = 64,
    far_context: int | None = None,
    repeats: int = 5,
    rounds: int = 4,
    progress: Callable[[str], None] = lambda _: None,
) -> MeasuredCosts:
    """Times rounds of every bucket that a schedule of this engine may choose, and of every prompt chunk.

    Each repeat goes through all kinds of rounds before the next one starts, so that a slow spell of the
    machine falls on all of them; a repeat's value is the median of its rounds, a cell's the median of its
    repeats.

    Args:
      engine: without a schedule; its slots must be free.
      dtype: of weights and cache, for the table.
      context: tokens that each lane has committed when the timing begins.
      far_context: a second one, for the cost of context; None = 4 times the first, or what there is room for.
      repeats: at least 1; with 1 there is no spread, and so no doubt. Counts of lanes whose decoding rounds
        are noisy get as many again, or fewer if they come out.
      rounds: timed per kind and repeat.
      progress: told what happens.

    Raises:
      ValueError: no room for the rounds in the engine's context, or a prefix cache.
    """
    if engine.prefix_cache:
        raise ValueError(
            "engine: expected one without a prefix cache, which spares it the prompts that are timed; load it with "
            "prefix_cache=False"
        )
    steps = (rounds + 1) * (engine.ladder.draft_length + 1)
    counts = sorted({engine.ladder.lanes(count) for count in lane_sweep(engine.max_slots)})
    needed = context + max(len(engine.ladder.scheduled(count)) for count in counts) * steps + 1
    if needed > engine.max_context:
        raise ValueError(
            f"context: expected room for {needed} tokens in the engine's context of {engine.max_context}; "
            "lower context or rounds, or raise max_context"
        )
    if far_context is None:
        far_context = min(4 * context, engine.max_context - steps - 1)
    seconds: dict[Kind, list[float]] = {}
    for bucket in _buckets(engine, counts):
        progress(f"compiling {bucket.lanes} lanes, {bucket.nodes} nodes")
        _rounds(engine, [bucket], context, 1, {})
    for repeat in range(repeats):
        for count in counts:
            progress(f"repeat {repeat + 1} of {repeats}: {count} lanes")
            _rounds(engine, engine.ladder.scheduled(count), context, rounds, seconds)
        for count in {counts[0], counts[-1]} if far_context > context else set():
            _rounds(engine, engine.ladder.scheduled(count)[:1], far_context, rounds, seconds)
        progress(f"repeat {repeat + 1} of {repeats}: prompt chunks")
        _chunks(engine, seconds)
    for repeat in range(repeats):
        doubtful = {cell.lanes for cell in _cells(seconds) if cell.noisy and not cell.chunk}
        if not doubtful:
            break
        for count in sorted(doubtful):
            progress(f"noisy: repeat {repeat + 1} of at most {repeats} more: {count} lanes")
            _rounds(engine, engine.ladder.scheduled(count), context, rounds, seconds)
    cells = _cells(seconds)
    return MeasuredCosts(
        hardware=hardware_name(),
        target=engine.method.target.identity,
        drafter=engine.method.drafter.name,
        draft_length=engine.method.drafter.draft_length,
        dtype=dtype,
        cells=cells,
        context_seconds=context_slope(cells, context, far_context),
    )


def _cells(seconds: Mapping[Kind, Sequence[float]]) -> tuple[Cell, ...]:
    return tuple(
        Cell(
            lanes=bucket.lanes,
            nodes=bucket.nodes,
            chunk=bucket.chunk,
            context=length,
            seconds=statistics.median(values),
            spread=spread(values),
        )
        for (bucket, length), values in seconds.items()
    )


def spread(values: Sequence[float]) -> float:
    """Width of the middle half over the median, which a single slow repeat moves as little as the median."""
    if len(values) < 2:
        return 0.0
    first, median, third = statistics.quantiles(values, n=4, method="inclusive")
    return (third - first) / median


def context_slope(cells: Sequence[Cell], near: int, far: int) -> float:
    """Seconds per committed token of a lane, from plain rounds at two contexts; 0 if the noise hides it."""
    at = {(c.lanes, c.context): c.seconds for c in cells if c.chunk == 0 and c.nodes == c.lanes}
    slopes = [
        (at[lanes, far] - at[lanes, near]) / (lanes * (far - near))
        for lanes, context in at
        if context == far and far > near
    ]
    return max(statistics.median(slopes), 0.0) if slopes else 0.0


def _buckets(engine: Engine, counts: Sequence[int]) -> list[Bucket]:
    return list(itertools.chain(*(engine.ladder.scheduled(count) for count in counts)))


def _rounds(
    engine: Engine, buckets: Sequence[Bucket], context: int, rounds: int, seconds: dict[Kind, list[float]]
) -> None:
    """Adds one value per bucket: the median of some rounds of requests that all have lanes."""
    room = len(buckets) * (rounds + 1) * (engine.ladder.draft_length + 1)
    settings = Settings(max_tokens=min(room, engine.max_context - context), ignore_eos=True)
    prompt = [1 + i % 7 for i in range(context)]
    with engine.session(overlap=False) as session:
        session.add([prompt] * buckets[0].lanes, settings)
        while session.prefilling:
            session.step()
        for bucket in buckets:
            session.step(bucket)
            values = [_timed(session, bucket) for _ in range(rounds)]
            seconds.setdefault((bucket, context), []).append(statistics.median(values))


def _chunks(engine: Engine, seconds: dict[Kind, list[float]]) -> None:
    """Adds one value per prompt chunk: the fastest of 3, since a prompt has only one round of a kind."""
    for chunk in engine.ladder.chunks:
        if chunk + 2 > engine.max_context:
            continue
        values = []
        for _ in range(3):
            with engine.session(overlap=False) as session:
                session.add([[1 + i % 7 for i in range(chunk + 1)]], Settings(max_tokens=1))
                values.append(_timed(session, None))
        seconds.setdefault((engine.ladder.prefill(chunk + 1), 0), []).append(min(values))


def _timed(session: Session, bucket: Bucket | None) -> float:
    start = time.perf_counter()
    session.step(bucket)
    return time.perf_counter() - start


def gains(costs: MeasuredCosts, acceptance: Sequence[float]) -> Mapping[int, tuple[int, float]]:
    """By lanes: the nodes per round at which drafting gains most over plain rounds, and that gain.

    Args:
      costs: as measured.
      acceptance: fraction of rounds in which draft token 1, 2, ... was accepted.
    """
    best = {}
    for lanes, ratios in costs.break_even().items():
        speeds = {lanes: 1.0}
        for nodes, ratio in ratios.items():
            share, rest = divmod(nodes - lanes, lanes)
            partial = acceptance[share] * rest / lanes if share < len(acceptance) else 0.0
            speeds[nodes] = (1 + sum(acceptance[:share]) + partial) / ratio
        best[lanes] = max(speeds.items(), key=lambda pair: pair[1])
    return best


def break_even_concurrency(costs: MeasuredCosts, counters: Counters) -> int | None:
    """The most requests at a time at which drafting still gains; None if it never does."""
    gaining = [
        lanes for lanes, (_, gain) in gains(costs, counters.acceptance_by_position()).items() if gain > 1
    ]
    return max(gaining, default=None)
