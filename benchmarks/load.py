"""Throughput under load: plain decoding, full-block verification and scheduled verification, side by side.

Closed loops keep a number of requests running; open ones send requests at random times (Poisson). Every
repeat runs all variants before the next one starts, so that a slow spell of the machine falls on all of
them. On 2 cores with the embedded model and 4 repeats of 20 s at 6 concurrencies it takes half an hour.

  python benchmarks/load.py --drafter FOLDER --schedule costs.json --calibration calibration.json
"""

import argparse
import dataclasses
import itertools
import json
import math
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from jspec.bench.loops import loop_period
from jspec.bench.prompts import chats_by_task
from jspec.engine import Engine
from jspec.loading import load, with_drafter
from jspec.results import Counters, add
from jspec.session import Session
from jspec.settings import Settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """What one variant did in one stretch of time."""

    tokens_per_second: float
    finished: int
    mean_running: float
    latency: float | None  # median seconds from a request's arrival to its end
    inert_lanes: int  # of rounds that were launched for requests that had ended
    looping: int  # finished texts that end in a loop
    counters: Counters


def closed_loop(
    engine: Engine,
    prompts: Sequence[object],
    settings: Settings,
    *,
    concurrency: int,
    seconds: float,
    settle: float,
) -> Window:
    """Keeps `concurrency` requests running, and counts what happens after `settle` seconds."""

    def arrivals(session: Session, now: float, open_: int) -> int:
        return concurrency - open_

    return serve(engine, prompts, settings, arrivals, seconds=seconds, settle=settle)


def open_loop(
    engine: Engine,
    prompts: Sequence[object],
    settings: Settings,
    *,
    rate: float,
    seconds: float,
    settle: float,
    seed: int,
) -> Window:
    """Sends requests at random times, `rate` per second on average, whether or not others have ended."""
    times = poisson(rate, seed)
    following = [next(times)]

    def arrivals(session: Session, now: float, open_: int) -> int:
        due = 0
        while following[0] <= now:
            due += 1
            following[0] = next(times)
        return due

    return serve(engine, prompts, settings, arrivals, seconds=seconds, settle=settle)


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Seconds at which requests arrive."""
    rng, now = random.Random(seed), 0.0
    while True:
        now += rng.expovariate(rate)
        yield now


def serve(
    engine: Engine, prompts: Sequence[object], settings: Settings, arrivals, *, seconds: float, settle: float
) -> Window:
    """Runs a session for a while; `arrivals` says how many requests come before each round."""
    following = itertools.cycle(prompts)
    arrived: dict[int, float] = {}
    latencies, results, running, tokens = [], [], [], 0
    with engine.session() as session:
        start = time.perf_counter()
        while (now := time.perf_counter() - start) < settle + seconds:
            for _ in range(arrivals(session, now, len(arrived))):
                (index,) = session.add([next(following)], settings)  # type: ignore[list-item]
                arrived[index] = now
            if not session.busy:
                time.sleep(0.001)
                continue
            pieces = session.step()
            now = time.perf_counter() - start
            counted = now >= settle
            if counted:
                running.append(session.num_running)
            for piece in pieces:
                tokens += len(piece.token_ids) if counted else 0
                if piece.finish_reason is None:
                    continue
                since = arrived.pop(piece.index)
                if counted:
                    latencies.append(now - since)
                    results.append(session.result(piece.index))
        elapsed = time.perf_counter() - start - settle
        inert_lanes = session.inert_lanes
    return Window(
        tokens_per_second=tokens / elapsed,
        finished=len(results),
        mean_running=statistics.mean(running) if running else 0.0,
        latency=statistics.median(latencies) if latencies else None,
        inert_lanes=inert_lanes,
        looping=sum(loop_period(result.token_ids) is not None for result in results),
        counters=add([result.counters for result in results]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--drafter", required=True)
    parser.add_argument("--draft-length", type=int)
    parser.add_argument("--schedule", required=True)
    parser.add_argument("--calibration")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--prompts", type=Path, help='JSON Lines with "prompt" or "messages"; left out: built-in ones'
    )
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rate", type=float, nargs="*", default=[], help="requests per second, open loops")
    parser.add_argument("--max-slots", type=int, default=32)
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--settle", type=float, default=3.0, help="seconds before counting begins")
    parser.add_argument("--overlap", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--compilation-cache", default="~/.cache/jspec/compiled")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    plain = load(
        options.model,
        drafter="plain",
        dtype=options.dtype,
        max_slots=options.max_slots,
        max_context=options.max_context,
        prefix_cache=False,
        overlap=options.overlap,
        compilation_cache=options.compilation_cache,
    )
    full = with_drafter(plain, options.drafter, draft_length=options.draft_length)
    scheduled = with_drafter(
        plain,
        options.drafter,
        draft_length=options.draft_length,
        schedule=options.schedule,
        calibration=options.calibration,
    )
    engines = {"plain": plain, "full": full, "scheduled": scheduled}
    prompts = [chat for group in chats_by_task(options.prompts).values() for chat in group]
    random.Random(0).shuffle(prompts)
    settings = Settings(max_tokens=options.max_tokens, temperature=options.temperature)
    for name, engine in engines.items():
        print(f"compiling {name}", flush=True)
        engine.warm_up(prompt_lengths=(options.max_context // 2,), lanes=max(options.concurrency, default=1))

    loads = [("closed", c) for c in options.concurrency] + [("open", r) for r in options.rate]
    windows: dict[tuple[str, float, str], list[Window]] = {}
    for repeat, (kind, load_), (name, engine) in itertools.product(
        range(options.repeats), loads, engines.items()
    ):
        common = dict(seconds=options.seconds, settle=options.settle)
        if kind == "closed":
            window = closed_loop(engine, prompts, settings, concurrency=load_, **common)
        else:
            window = open_loop(engine, prompts, settings, rate=load_, seed=repeat, **common)
        windows.setdefault((kind, load_, name), []).append(window)
        print(
            f"{repeat + 1}/{options.repeats} {kind} {load_:g} {name}: {window.tokens_per_second:.1f} tokens/s, "
            f"{window.mean_running:.1f} running, {window.finished} finished, {window.looping} looping, "
            f"{window.inert_lanes} inert lanes",
            flush=True,
        )
    rows = []
    for kind, load_ in loads:
        speeds = {name: [w.tokens_per_second for w in windows[kind, load_, name]] for name in engines}
        medians = {name: statistics.median(values) for name, values in speeds.items()}
        better = max(("plain", "full"), key=lambda name: medians[name])
        ratio = statistics.median(s / b for s, b in zip(speeds["scheduled"], speeds[better], strict=True))
        rows.append({"kind": kind, "load": load_, **medians, "better": better, "scheduled_of_better": ratio})
        waits = {
            name: statistics.median(
                [w.latency for w in windows[kind, load_, name] if w.latency] or [math.nan]
            )
            for name in engines
        }
        print(
            f"{kind} {load_:g}: "
            + ", ".join(f"{name} {medians[name]:.1f} ({waits[name]:.2f} s)" for name in engines)
            + f" tokens/s (median latency); scheduled is {ratio:.3f} of {better}, the better of the other two"
        )
    worst = min(rows, key=lambda row: row["scheduled_of_better"])
    ahead = [f"{row['kind']} {row['load']:g}" for row in rows if row["scheduled_of_better"] > 1]
    print(
        f"scheduled is at least {worst['scheduled_of_better']:.3f} of the better one "
        f"({worst['kind']} {worst['load']:g}); ahead of both at: {', '.join(ahead) or 'none'}"
    )
    if options.json:
        detail = [
            {"kind": kind, "load": load_, "variant": name, "windows": [dataclasses.asdict(w) for w in found]}
            for (kind, load_, name), found in windows.items()
        ]
        options.json.write_text(json.dumps({"rows": rows, "windows": detail}, indent=1), "utf-8")


if __name__ == "__main__":
    main()
