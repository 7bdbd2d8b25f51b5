"""What a grammar costs, by when the host does its work: the modes of `jspec.grammar.overlap`, side by side.

Traffic is JSON of one schema, or such requests and free ones by turns. All requests of a run are there at its
start, and wait for slots. Every repeat runs all modes before the next one starts. The modes must not differ
in tokens, nor so in what is accepted: the script ends with an error if they do.

  python benchmarks/grammar.py --drafter train/recipes/smollm2/calls-dflash2
"""

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence

from jspec.bench.calls import CALLS
from jspec.bench.prompts import chats_by_task
from jspec.engine import Engine
from jspec.grammar.grammar import Grammar
from jspec.grammar.overlap import MODES, GrammarOverlap
from jspec.loading import load
from jspec.results import Result, add
from jspec.settings import Settings

CALL = Grammar(
    json_schema={
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 30},
            "arguments": {
                "type": "object",
                "additionalProperties": {
                    "anyOf": [{"type": ["number", "boolean"]}, {"type": "string", "maxLength": 40}]
                },
                "maxProperties": 4,
            },
        },
        "required": ["name", "arguments"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_pattern": " ?"},
    }
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One run of one mode: seconds of each request, and its results."""

    first: list[float]  # to the first token
    latency: list[float]
    per_token: list[float]  # between the first token and the last
    results: list[Result]


def run(engine: Engine, mode: GrammarOverlap, prompts: Sequence[object], settings: Sequence[Settings]) -> Run:
    first: dict[int, float] = {}
    last: dict[int, float] = {}
    with engine.session(overlap=True, grammar_overlap=mode) as session:
        start = time.perf_counter()
        indices = session.add(prompts, settings)  # type: ignore[arg-type]
        while session.busy:
            for piece in session.step():
                now = time.perf_counter() - start
                first.setdefault(piece.index, now)
                last[piece.index] = now
        results = [session.result(index) for index in indices]
    engine.forget_prefixes()
    return Run(
        first=[first[index] for index in indices],
        latency=[last[index] for index in indices],
        per_token=[
            (last[index] - first[index]) / (len(result.token_ids) - 1)
            for index, result in zip(indices, results, strict=True)
            if len(result.token_ids) > 1
        ],
        results=results,
    )


def traffic(kind: str, count: int, options: argparse.Namespace) -> tuple[list[object], list[Settings]]:
    """Prompts and settings of a run."""
    calls, talk = itertools.cycle(CALLS), itertools.cycle(itertools.chain(*chats_by_task().values()))
    prompts: list[object] = []
    settings = []
    for number in range(count):
        is_call = kind == "schema" or number % 2 == 0
        prompts.append(next(calls) if is_call else next(talk))
        settings.append(
            Settings(
                max_tokens=options.max_tokens,
                temperature=options.temperature,
                seed=number,
                grammar=CALL if is_call else None,
            )
        )
    return prompts, settings


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model")
    parser.add_argument("--drafter", default="ngram")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--max-slots", type=int, default=4)
    parser.add_argument("--max-context", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--compilation-cache", default="~/.cache/jspec/compiled")
    options = parser.parse_args()

    engine = load(
        options.model,
        drafter=options.drafter,
        dtype=options.dtype,
        max_slots=options.max_slots,
        max_context=options.max_context,
        grammar=True,
        compilation_cache=options.compilation_cache,
    )
    print("traffic  mode  TTFT s  TPOT ms  latency s  acceptance  mean commit length")
    for kind in ("schema", "mixed"):
        prompts, settings = traffic(kind, options.requests, options)
        warm = run(engine, "two", prompts, settings)  # compiles what it needs
        runs: dict[GrammarOverlap, list[Run]] = {mode: [] for mode in MODES}
        for _, mode in itertools.product(range(options.repeats), MODES):
            runs[mode].append(run(engine, mode, prompts, settings))
        for mode, made in runs.items():
            counters = add([result.counters for one in made for result in one.results])
            first, latency, per_token = (
                statistics.median(itertools.chain(*(getattr(one, name) for one in made)))
                for name in ("first", "latency", "per_token")
            )
            print(
                f"{kind:7}  {mode:4}  {first:6.3f}  {1000 * per_token:7.2f}  {latency:9.3f}  "
                f"{counters.acceptance_rate or 0:10.3f}  {counters.mean_commit_length or 0:18.3f}"
            )
        for mode, one in ((mode, one) for mode, made in runs.items() for one in made):
            for expected, got in zip(warm.results, one.results, strict=True):
                if (expected.token_ids, expected.counters.accepted) != (got.token_ids, got.counters.accepted):
                    raise SystemExit(f"{kind}, {mode}: expected the same tokens in every mode, got others")
    print("every mode gave the same tokens and accepted the same")


if __name__ == "__main__":
    main()
