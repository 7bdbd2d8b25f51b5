"""Plain and speculative decoding of the same prompts in one run, interleaved."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from jspec.bench.loops import loop_period
from jspec.engine import Engine
from jspec.results import Counters, Result, add
from jspec.settings import Settings
from jspec.timings import Timings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One decoding of one task's prompts by one variant."""

    seconds: float  # whole, prompts included
    decode_seconds: float  # from each prompt's first token to its last
    emitted: int  # all tokens
    decoded: int  # tokens after the first of each prompt


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measurement:
    """A variant on a task: medians over the repeats, counts from one of them (they are all equal)."""

    variant: str
    task: str
    tokens_per_second: float  # decode only, median
    spread: float  # (slowest - fastest) / median of the repeats
    ratio: float  # to plain, median of the per-repeat ratios
    end_to_end_ratio: float
    counters: Counters
    shares: Mapping[str, float]  # of the round: draft, target, rest
    host_share: float  # of the round: the part of the rest that is Python between the programs
    identical: bool | None  # tokens equal to plain's; None for plain itself and for text without a seed
    looping: tuple[int, ...]  # prompts left out because their text is stuck in a loop
    simulated: bool


def decode_once(engine: Engine, prompts: Sequence[object], settings: Settings) -> Run:
    """Decodes the prompts one after the other and times them from outside."""
    seconds = decode_seconds = 0.0
    emitted = decoded = 0
    for prompt in prompts:
        start = time.perf_counter()
        first = first_count = count = 0
        for piece in engine.stream([prompt], settings):  # type: ignore[list-item]
            count += len(piece.token_ids)
            if not first and count:
                first, first_count = time.perf_counter(), count
        end = time.perf_counter()
        seconds += end - start
        if count:  # a request that failed has no first token
            decode_seconds += end - first
        emitted += count
        decoded += count - first_count
    return Run(seconds=seconds, decode_seconds=decode_seconds, emitted=emitted, decoded=decoded)


def measure(
    engines: Mapping[str, Engine],
    tasks: Mapping[str, Sequence[object]],
    settings: Settings,
    *,
    repeats: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Measurement]:
    """Measures every engine on every task; the first engine is the one that ratios refer to.

    Each repeat runs all engines before the next one starts, so that a slow spell of the machine
    falls on all of them. Prompts whose plain text is stuck in a loop are left out.

    Raises:
      ValueError: every prompt of a task ends in a loop, so that no speed would mean anything, or has no
        token after its first.
    """
    measurements = []
    for task, prompts in tasks.items():
        progress(f"{task}: reference texts")
        results = {name: engine.generate(prompts, settings) for name, engine in engines.items()}  # type: ignore[arg-type]
        plain = next(iter(results.values()))
        looping = tuple(i for i, r in enumerate(plain) if loop_period(r.token_ids) is not None)
        kept = [i for i in range(len(prompts)) if i not in looping]
        if not kept:
            raise ValueError(
                f"{task}: expected text, got loops on all {len(prompts)} prompts; a speed would mean nothing. "
                "Use other prompts, fewer tokens or a repetition penalty"
            )
        if any(all(len(r[i].token_ids) < 2 for i in kept) for r in results.values()):
            raise ValueError(
                f"{task}: expected a prompt with at least 2 tokens of text, got fewer on all; a decode speed needs a "
                "token after the first. Raise max_tokens, or use other prompts"
            )
        selected = [prompts[i] for i in kept]
        runs: dict[str, list[Run]] = {name: [] for name in engines}
        for repeat in range(repeats):
            for name, engine in engines.items():
                progress(f"{task}: {name}, repeat {repeat + 1} of {repeats}")
                runs[name].append(decode_once(engine, selected, settings))
        base = next(iter(runs.values()))
        for name, engine in engines.items():
            timings = Timings()
            for prompt in selected:
                engine.generate([prompt], settings, timings=timings)  # type: ignore[list-item]
            measurements.append(
                summarise(name, task, runs[name], base, [results[name][i] for i in kept], timings, looping)
            )
            same = [results[name][i].token_ids == plain[i].token_ids for i in kept]
            repeatable = settings.temperature == 0 or settings.seed is not None
            if name != next(iter(engines)) and repeatable:
                measurements[-1] = dataclasses.replace(measurements[-1], identical=all(same))
    return measurements


def summarise(
    name: str,
    task: str,
    runs: Sequence[Run],
    base: Sequence[Run],
    results: Sequence[Result],
    timings: Timings,
    looping: tuple[int, ...],
) -> Measurement:
    """Medians of the repeats, and their ratios to the base's same repeat."""
    speeds = [run.decoded / run.decode_seconds for run in runs]
    whole = [run.emitted / run.seconds for run in runs]
    base_speeds = [run.decoded / run.decode_seconds for run in base]
    base_whole = [run.emitted / run.seconds for run in base]
    return Measurement(
        variant=name,
        task=task,
        tokens_per_second=statistics.median(speeds),
        spread=(max(speeds) - min(speeds)) / statistics.median(speeds),
        ratio=statistics.median(a / b for a, b in zip(speeds, base_speeds, strict=True)),
        end_to_end_ratio=statistics.median(a / b for a, b in zip(whole, base_whole, strict=True)),
        counters=add([r.counters for r in results]),
        shares=timings.shares,
        host_share=timings.host / timings.total,
        identical=None,
        looping=looping,
        simulated=any(r.simulated for r in results),
    )
