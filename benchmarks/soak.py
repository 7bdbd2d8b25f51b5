"""Many short requests against one server of a tiny model: does anything leak, compile, or change a reply?

Prompts of random lengths, of which many begin alike; every sampling setting; clients that leave before, amid
and after their first tokens; priorities that preempt; a cache too small for all slots. Every reply that is
read to its end must equal what the engine says when it decodes that request alone. At the end every slot and
page is free, no program has been compiled, and memory has not grown since the first fifth.

  python benchmarks/soak.py --requests 20000        # about 10 minutes on 2 cores
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import httpx2
import jax
import jax.numpy as jnp
import tokenizers
from server import NAME, serving

from jspec.decode import Method, Models
from jspec.drafters.ngram import ngram
from jspec.engine import Engine
from jspec.settings import Settings
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves
from jspec.targets.rope import Rope
from jspec.text.tokenizer import Tokenizer
from jspec_serve.commands.serve import warm_up

VOCABULARY = 48
LEAVES = 0.2  # of the clients
KINDS = 400  # different requests: each is decoded alone once
ALIKE = [random.Random(0).randrange(VOCABULARY) for _ in range(24)]  # a beginning that prompts share
OPTIONAL: dict[str, Any] = {
    "top_k": 6,
    "top_p": 0.8,
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.3,
    "repetition_penalty": 1.2,
    "logit_bias": {"3": 2.0, "5": -100},
    "allowed_token_ids": list(range(4, 40)),
    "stop_token_ids": [7],
    "stop": ["w9"],
    "min_tokens": 2,
    "logprobs": 2,
}


@dataclasses.dataclass(kw_only=True)
class Tally:
    """What has happened so far."""

    equal: int = 0
    left: int = 0
    wrong: list[str] = dataclasses.field(default_factory=list)
    resident: list[int] = dataclasses.field(default_factory=list)  # bytes, at each twentieth

    @property
    def ended(self) -> int:
        return self.equal + self.left + len(self.wrong)


def tiny_engine(max_slots: int) -> Engine:
    """Two layers of random weights, whose text is varied but often repeats itself, as n-grams need it."""
    config = DecoderConfig(
        architecture="qwen3",
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_size=8,
        norm_eps=1e-6,
        max_context=64,
        full_rope=Rope(theta=1000.0),
        layer_kinds=("full", "full"),
        query_key_norm=True,
        query_scale=8**-0.5,
    )
    leaves = decoder_leaves(config, jnp.dtype(jnp.float32))
    keys = jax.random.split(jax.random.key(0), len(leaves))
    params = tuple(
        0.6 * jax.random.normal(key, leaf.shape, leaf.dtype) + ("norm" in leaf.path)
        for key, leaf in zip(keys, leaves, strict=True)
    )
    words = {f"w{id_}": id_ for id_ in range(VOCABULARY)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Engine(
        method=Method(
            target=DecoderTarget(config),
            drafter=ngram(draft_length=3, min_n=1, max_n=2),
            max_log_probs=2,
        ),
        models=Models(target=params, drafter=()),
        tokenizer=Tokenizer(backend=backend, chat_templates={}, special_tokens={}, bos_id=None, eos_ids=()),
        eos_ids=(1,),
        max_slots=max_slots,
        page_size=8,
        cache_tokens=max_slots * 40,  # not all slots' whole contexts
        chunks=(7, 31),
    )


def asked(kind: int) -> dict[str, Any]:
    """The body of a request: the same for the same number."""
    rng = random.Random(kind)
    prompt = ALIKE[: rng.choice([0, 8, 16, 24])] + [
        rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 12))
    ]
    body = {
        "model": NAME,
        "prompt": prompt,
        "max_tokens": rng.randint(2, 16),
        "temperature": rng.choice([0, 0.7, 1.3]),
        "seed": kind,
        "speculation": rng.choice(["on", "on", "off", {"draft_length": 2}]),
    }
    return body | {name: value for name, value in OPTIONAL.items() if rng.random() < 0.2}


def own_settings(body: dict[str, Any]) -> Settings:
    """The same for the engine, which decodes it without speculation."""
    values = {name: value for name, value in body.items() if name in {*OPTIONAL, "max_tokens", "seed"}}
    if "logprobs" in values:
        values["log_probs"] = values.pop("logprobs")
    if "logit_bias" in values:
        values["logit_bias"] = {int(id_): bias for id_, bias in values["logit_bias"].items()}
    return Settings(**values, temperature=float(body["temperature"]), draft_length=0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def client_work(url: str, requests: int, together: int, solo: dict[int, tuple[str, str]]) -> Tally:
    """Sends all requests, so many at a time."""
    tally = Tally()
    rng = random.Random(1)
    plans = iter(
        [(rng.randrange(KINDS), rng.random(), rng.choice([-1, 0, 0, 0, 1])) for _ in range(requests)]
    )

    async def one(client: httpx2.AsyncClient, kind: int, chance: float, priority: int) -> None:
        body = asked(kind) | {"priority": priority}
        if chance < LEAVES:
            try:
                async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
                    if chance < LEAVES / 2:
                        await anext(reply.aiter_raw())
            except StopAsyncIteration:
                pass
            tally.left += 1
            return
        if chance < LEAVES * 1.5:  # before it has an answer at all
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(client.post("/v1/completions", json=body), rng.random() * 0.02)
            tally.left += 1
            return
        reply = await client.post("/v1/completions", json=body)
        if reply.status_code != 200:
            tally.wrong.append(f"{reply.status_code} {reply.text[:300]} for {body}")
            return
        (choice,) = reply.json()["choices"]
        if (choice["text"], choice["finish_reason"]) == solo[kind]:
            tally.equal += 1
        else:
            tally.wrong.append(f"{choice['text']!r}, {choice['finish_reason']}, not {solo[kind]}, for {body}")

    async def worker(client: httpx2.AsyncClient) -> None:
        for plan in plans:
            await one(client, *plan)
            if tally.ended >= len(tally.resident) * requests / 20:
                tally.resident.append(resident_bytes())
                print(f"{tally.ended}/{requests}: {tally.resident[-1] / 2**20:.0f} MiB", flush=True)

    limits = httpx2.Limits(max_connections=together)
    async with (
        httpx2.AsyncClient(base_url=url, timeout=120, limits=limits) as client,
        asyncio.TaskGroup() as group,
    ):
        for _ in range(together):
            group.create_task(worker(client))
    return tally


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--together", type=int, default=12, help="clients at a time")
    parser.add_argument("--max-slots", type=int, default=6)
    parser.add_argument("--growth", type=float, default=24.0, help="MiB that memory may grow after a fifth")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    engine = tiny_engine(options.max_slots)
    warm_up(engine)
    solo = {}
    for kind in range(KINDS):
        body = asked(kind)
        (result,) = engine.generate([body["prompt"]], own_settings(body))
        solo[kind] = result.text, result.finish_reason
    engine.forget_prefixes()
    traces = sum(engine.programs.traces.values())
    with serving(engine, max_waiting=4 * options.together) as (service, url):
        began = time.perf_counter()
        tally = asyncio.run(client_work(url, options.requests, options.together, solo))
        seconds = time.perf_counter() - began
        deadline = time.monotonic() + 30
        while (unfinished := service.thread.unfinished) and time.monotonic() < deadline:
            time.sleep(0.01)
        free_slots, free_pages = len(engine._runner.free_slots), engine.free_pages

    read = service.metrics.registry.get_sample_value
    counts = {name: read(f"jspec_{name}_total") or 0 for name in ("preemptions", "reused_prompt_tokens")}
    for stage in ("verified", "accepted"):
        counts[stage] = read("jspec_draft_tokens_total", {"stage": stage}) or 0
    counts["cancelled"] = read("jspec_requests_total", {"reason": "cancelled"}) or 0
    growth = (max(tally.resident[4:]) - tally.resident[4]) / 2**20 if len(tally.resident) > 5 else 0.0
    found = {
        "requests": options.requests,
        "seconds": seconds,
        "equal_to_solo": tally.equal,
        "clients_that_left": tally.left,
        "wrong": tally.wrong[:20],
        "unfinished": unfinished,
        "free_slots": f"{free_slots} of {engine.max_slots}",
        "free_pages": f"{free_pages} of {engine.num_pages}",
        "programs_compiled": sum(engine.programs.traces.values()) - traces,
        "growth_mib": growth,
        **counts,
    }
    print(json.dumps(found, indent=1))
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), "utf-8")
    failed = [
        bool(tally.wrong),
        unfinished > 0,
        free_slots != engine.max_slots,
        free_pages != engine.num_pages,
        found["programs_compiled"] != 0,
        growth > options.growth,
        tally.ended != options.requests,
    ]
    sys.exit(any(failed))


if __name__ == "__main__":
    main()
