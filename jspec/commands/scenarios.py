"""`jspec bench --scenario`: work on which speculation may not pay."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Console

from jspec.bench.scenarios import LOADS, SCENARIOS, run, verdict
from jspec.bench.table import scenario_table, vocabulary_table
from jspec.bench.variants import chains
from jspec.bench.vocabularies import vocabulary_costs, vocabulary_verdict
from jspec.engine import Engine
from jspec.loading import load

VOCABULARY = "vocabulary"  # a scenario that needs models of its own


def scenario_names(wanted: Sequence[str]) -> list[str]:
    """Those that are asked for, each once.

    Raises:
      ValueError: there is none of that name.
    """
    known = [*SCENARIOS, VOCABULARY]
    unknown = [name for name in wanted if name not in [*known, "all"]]
    if unknown:
        raise ValueError(
            f"scenario: expected some of {', '.join(known)}, all, got {', '.join(unknown)}; pick from these"
        )
    return known if "all" in wanted else list(dict.fromkeys(wanted))


def scenario_engines(
    model: str | None,
    draft_lengths: Mapping[str, Sequence[int | None]],
    dtype: str,
    schedule: str | None,
    calibration: str | None,
    compilation_cache: str,
) -> dict[str, Engine]:
    """Engines with slots for the greatest load."""
    plain = load(
        model,
        drafter="plain",
        dtype=dtype,
        max_slots=max(LOADS),
        prefix_cache=False,  # cases are repeated only to measure them again
        compilation_cache=compilation_cache,
    )
    return chains(plain, draft_lengths, schedule, calibration)


def measure_scenarios(
    console: Console,
    names: Sequence[str],
    engines: Callable[[], Mapping[str, Engine]],
    *,
    max_tokens: int,
    repeats: int,
) -> dict[str, Any]:
    """Measures and prints each scenario; returns everything as JSON."""
    found: dict[str, Any] = {"outcomes": [], "vocabularies": [], "verdicts": {}}
    with console.status("loading the model") as status:
        made = engines() if set(names) - {VOCABULARY} else {}
        for name in names:
            if name == VOCABULARY:
                costs = vocabulary_costs(repeats=repeats, progress=status.update)
                found["vocabularies"] = [dataclasses.asdict(cost) for cost in costs]
                table, said = vocabulary_table(costs), vocabulary_verdict(costs)
            else:
                cases = SCENARIOS[name](made["plain"], max_tokens)
                outcomes = run(made, cases, repeats=repeats, progress=status.update)
                found["outcomes"] += [dataclasses.asdict(one) for one in outcomes]
                table, said = scenario_table(outcomes), verdict(outcomes)
            found["verdicts"][name] = said
            console.print(table)
            console.print(said)
    return found
