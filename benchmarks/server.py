"""A server beside its own engine: tokens per second, latency, and the first token of a prompt it has seen.

For each concurrency and drafter the engine decodes alone for a while, in a closed loop of its own session;
then a server is put before the same engine, and as many clients of another process keep it busy for as long,
streaming. The two take turns, so that a slow spell of the machine falls on both. Then a prompt of 1,000
tokens is sent again and again, with the prefix cache and with an emptied one.

  python benchmarks/server.py      # plain and n-gram: about 20 minutes on 2 cores
  python benchmarks/server.py --drafter FOLDER --schedule costs.json --calibration calibration.json
"""

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx2
from load import closed_loop

from jspec.bench.prompts import PROMPTS, Chat, chats_by_task
from jspec.engine import Engine
from jspec.loading import load, with_drafter
from jspec.settings import Settings
from jspec_serve.commands.serve import warm_up
from jspec_serve.limits import Limits
from jspec_serve.server import DrainingServer, Listen, bound_socket
from jspec_serve.service import Service

NAME = "measured"
PATH = "/v1/chat/completions"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Served:
    """What a server did in one stretch of time."""

    tokens_per_second: float
    finished: int
    latency: float  # median seconds of a request
    first_token: float  # median seconds to its first event
    late: float  # 95th percentile of that


@contextlib.contextmanager
def serving(engine: Engine, *, max_waiting: int = 256) -> Iterator[tuple[Service, str]]:
    """A server before an engine, for as long as the block lasts."""
    service = Service(engine, name=NAME, limits=Limits(max_waiting=max_waiting))
    listen = Listen(port=0)
    sock = bound_socket(listen)
    server = DrainingServer(service, listen=listen)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    try:
        yield service, f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()


def served_loop(
    engine: Engine, *, concurrency: int, max_tokens: int, seconds: float, settle: float
) -> Served:
    """Clients of another process keep a server busy; tokens are counted by the server."""
    with serving(engine) as (service, url):

        def tokens() -> float:
            return service.metrics.registry.get_sample_value("jspec_generated_tokens_total") or 0.0

        command = [sys.executable, __file__, "--client", url, "--concurrency", str(concurrency)]
        command += ["--max-tokens", str(max_tokens), "--seconds", str(settle + seconds + 2)]
        clients = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        while not service.thread.rounds:  # the other process starts
            assert clients.poll() is None
            time.sleep(0.01)
        time.sleep(settle)
        before, began = tokens(), time.perf_counter()
        time.sleep(seconds)
        grown, elapsed = tokens() - before, time.perf_counter() - began
        told = json.loads(clients.communicate()[0])
    assert clients.returncode == 0
    return Served(tokens_per_second=grown / elapsed, **told)


async def keep_busy(url: str, concurrency: int, max_tokens: int, seconds: float) -> dict[str, float]:
    """Streams answers until the time is over; those that have not ended then are dropped."""
    following = itertools.cycle(chats())
    latencies, firsts = [], []
    end = time.perf_counter() + seconds

    async def worker(client: httpx2.AsyncClient) -> None:
        while time.perf_counter() < end:
            began, first = time.perf_counter(), None
            body = {"model": NAME, "messages": next(following), "max_tokens": max_tokens, "temperature": 0}
            async with client.stream("POST", PATH, json=body | {"stream": True}) as reply:
                reply.raise_for_status()
                async for _ in reply.aiter_raw():
                    first = first or time.perf_counter()
            assert first is not None
            firsts.append(first - began)
            latencies.append(time.perf_counter() - began)

    async with httpx2.AsyncClient(
        base_url=url, timeout=600, limits=httpx2.Limits(max_connections=concurrency)
    ) as client:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds), asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(worker(client))
    return {
        "finished": len(latencies),
        "latency": statistics.median(latencies),
        "first_token": statistics.median(firsts),
        "late": statistics.quantiles(firsts, n=20)[-1] if len(firsts) > 1 else firsts[0],
    }


def chats() -> list[Chat]:
    """The built-in prompts, shuffled."""
    found = [chat for group in chats_by_task().values() for chat in group]
    random.Random(0).shuffle(found)
    return found


def first_tokens(engine: Engine, *, length: int, repeats: int) -> dict[str, Any]:
    """Seconds to the first token of a repeated prompt, with the prefix cache and with an emptied one."""
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(" ".join(text for group in PROMPTS.values() for text in group))
    body = {"model": NAME, "max_tokens": 1, "temperature": 0}
    prompt = list(itertools.islice(itertools.cycle(ids), length))
    seconds: dict[str, list[float]] = {"without": [], "with": []}
    with serving(engine) as (_, url), httpx2.Client(base_url=url, timeout=600) as client:

        def ask() -> float:
            began = time.perf_counter()
            reply = client.post("/v1/completions", json=body | {"prompt": prompt})
            assert reply.status_code == 200, reply.text
            return time.perf_counter() - began

        ask()
        for _ in range(repeats):
            engine.forget_prefixes()  # nothing runs now
            seconds["without"].append(ask())
            seconds["with"].append(ask())
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    return {"prompt_tokens": length, **medians, "ratio": medians["without"] / medians["with"]}


def measured(
    engines: dict[str, Engine], concurrencies: Sequence[int], options: argparse.Namespace
) -> list[dict[str, Any]]:
    """One row per concurrency and variant."""
    settings = Settings(max_tokens=options.max_tokens)
    common = dict(seconds=options.seconds, settle=options.settle)
    own: dict[tuple[int, str], list[Any]] = {}
    served: dict[tuple[int, str], list[Served]] = {}
    for repeat, count, (name, engine) in itertools.product(
        range(options.repeats), concurrencies, engines.items()
    ):
        window = closed_loop(engine, chats(), settings, concurrency=count, **common)
        own.setdefault((count, name), []).append(window)
        one = served_loop(engine, concurrency=count, max_tokens=options.max_tokens, **common)
        served.setdefault((count, name), []).append(one)
        print(
            f"{repeat + 1}/{options.repeats} {count} clients, {name}: engine {window.tokens_per_second:.1f}, "
            f"server {one.tokens_per_second:.1f} tokens/s, {one.latency:.2f} s a request, first after {one.first_token:.2f} s",
            flush=True,
        )
    rows = []
    for count, name in own:
        pairs = list(zip(own[count, name], served[count, name], strict=True))
        rows.append(
            {
                "concurrency": count,
                "variant": name,
                "engine_tokens_per_second": statistics.median(a.tokens_per_second for a, _ in pairs),
                "server_of_engine": statistics.median(
                    b.tokens_per_second / a.tokens_per_second for a, b in pairs
                ),
                **{
                    field.name: statistics.median(getattr(one, field.name) for _, one in pairs)
                    for field in dataclasses.fields(Served)
                },
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--schedule")
    parser.add_argument("--calibration")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--concurrency", type=int, nargs="*", default=[1, 4, 16, 32])
    parser.add_argument("--max-context", type=int, default=1280)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--settle", type=float, default=4.0, help="seconds before counting begins")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--prompt-tokens", type=int, default=1000, help="of the prompt that is repeated; 0 = none"
    )
    parser.add_argument("--compilation-cache", default="~/.cache/jspec/compiled")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--client", metavar="URL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.client:
        (concurrency,) = options.concurrency
        told = asyncio.run(keep_busy(options.client, concurrency, options.max_tokens, options.seconds))
        print(json.dumps(told))
        return

    plain = load(
        options.model,
        drafter="plain",
        dtype=options.dtype,
        max_slots=max(options.concurrency, default=1),
        max_context=options.max_context,
        compilation_cache=options.compilation_cache,
    )
    engines = {"plain": plain, "fixed": with_drafter(plain, options.drafter)}
    if options.schedule:
        engines["scheduled"] = with_drafter(
            plain, options.drafter, schedule=options.schedule, calibration=options.calibration
        )
    for name, engine in engines.items():
        print(f"compiling {name}", flush=True)
        warm_up(engine)
    rows = measured(engines, options.concurrency, options)
    for row in rows:
        print(
            f"{row['concurrency']} clients, {row['variant']}: server {row['tokens_per_second']:.1f} tokens/s, "
            f"{row['server_of_engine']:.1%} of its engine's; a request {row['latency']:.2f} s, its first token "
            f"{row['first_token']:.2f} s (95%: {row['late']:.2f} s)"
        )
    found: dict[str, Any] = {"rows": rows}
    if options.prompt_tokens:
        first = first_tokens(engines["fixed"], length=options.prompt_tokens, repeats=7)
        found["first_token"] = first
        print(
            f"first token of {first['prompt_tokens']} repeated tokens: {first['with'] * 1e3:.0f} ms with the prefix cache, "
            f"{first['without'] * 1e3:.0f} ms without: {first['ratio']:.1f}x lower"
        )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), "utf-8")


if __name__ == "__main__":
    main()
