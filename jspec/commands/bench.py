"""`jspec bench`: drafters against plain decoding, in one run."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jspec.bench.calls import CALLS
from jspec.bench.costs import best_draft_length, round_costs
from jspec.bench.measure import measure
from jspec.bench.prompts import PROMPTS, chats_by_task
from jspec.bench.scenarios import SCENARIOS
from jspec.bench.simulate import CURVES, compare, curve_costs
from jspec.bench.table import (
    as_json,
    cost_table,
    measurement_table,
    round_table,
    simulation_table,
)
from jspec.bench.traces import load_traces, synthetic_traces
from jspec.bench.variants import chains
from jspec.commands.options import (
    DEFAULT_CACHE,
    Calibration,
    CompilationCache,
    Dtype,
    Model,
    Schedule,
    check_output,
)
from jspec.commands.scenarios import VOCABULARY, measure_scenarios, scenario_engines, scenario_names
from jspec.drafters.simulated import simulated
from jspec.drafters.tree_shape import parse_tree
from jspec.engine import Engine
from jspec.loading import NAMES, load, with_drafter
from jspec.results import add
from jspec.schedule.costs import MeasuredCosts, RoundCosts, load_costs
from jspec.settings import Settings


def bench(
    model: Model = None,
    drafter: Annotated[list[str] | None, typer.Option(help="May be given several times.")] = None,
    draft_length: Annotated[
        list[str] | None,
        typer.Option(
            help='Draft tokens per round, default each drafter\'s own; "DRAFTER=TOKENS": of that one alone. May be given '
            "several times."
        ),
    ] = None,
    tree: Annotated[
        list[str] | None,
        typer.Option(
            help='"WIDTHxDEPTHxTOKENS": also runs each checkpoint with this tree; "DRAFTER=WIDTHxDEPTHxTOKENS": that '
            "one alone. May be given several times."
        ),
    ] = None,
    dtype: Dtype = "float32",
    task: Annotated[
        list[str] | None, typer.Option(help=f"Of {', '.join(PROMPTS)}, calls; default all.")
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='JSON Lines with "prompt" or "messages", and "task", instead.')
    ] = None,
    max_tokens: Annotated[int, typer.Option()] = 96,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    seed: Annotated[
        int, typer.Option(help="Of sampled text, so that every run decodes the same and can be compared.")
    ] = 0,
    repeats: Annotated[int, typer.Option(min=1, help="Interleaved; medians are reported.")] = 5,
    schedule: Schedule = None,
    calibration: Calibration = None,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Work on which speculation may not pay: {', '.join(SCENARIOS)}, {VOCABULARY}, all. May be given several "
            "times."
        ),
    ] = None,
    simulate: Annotated[
        bool,
        typer.Option(help="No model: what a schedule gains on acceptance traces, by cost and concurrency."),
    ] = False,
    traces: Annotated[
        Path | None, typer.Option(help="For --simulate: of jspec calibrate. Left out: synthetic ones.")
    ] = None,
    costs: Annotated[
        bool, typer.Option(help="Also measure rounds by draft length and the break-even point.")
    ] = True,
    output: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Measures drafters against plain decoding of the same prompts; with a schedule, also scheduled ones."""
    console = Console()
    if simulate:
        given = {
            "model": model,
            "drafter": drafter,
            "draft_length": draft_length,
            "tree": tree,
            "task": task,
            "prompts": prompts,
            "scenario": scenario,
            "calibration": calibration,
            "json": output,
        }
        refuse("--simulate", given)
        show_simulation(console, traces, schedule)
        return
    if traces is not None:
        raise ValueError(f"traces: expected none without --simulate, got {str(traces)!r}; drop it")
    if calibration is not None and schedule is None:
        raise ValueError(f"calibration: expected none without --schedule, got {calibration!r}; pass both")
    drafters = drafter or ["ngram"]
    lengths = {
        name: tuple(map(draft_tokens, values)) or (None,)
        for name, values in by_drafter("draft_length", draft_length or (), drafters).items()
    }
    if scenario:
        given = {"tree": tree, "task": task, "prompts": prompts, "temperature": temperature}
        refuse("--scenario", given)
        names = scenario_names(scenario)
        check_output("json", output)
        found = measure_scenarios(
            console,
            names,
            lambda: scenario_engines(model, lengths, dtype, schedule, calibration, compilation_cache),
            max_tokens=max_tokens,
            repeats=repeats,
        )
        if output is not None:
            output.write_text(json.dumps(found, indent=1))
            console.print(f"written to {output}")
        return
    settings = Settings(max_tokens=max_tokens, temperature=temperature, seed=seed if temperature else None)
    check_output("json", output)
    tasks = chats_by_task(prompts)
    if prompts is None:
        tasks["calls"] = CALLS
    unknown = set(task or ()) - set(tasks)
    if unknown:
        raise ValueError(
            f"task: expected some of {', '.join(tasks)}, got {', '.join(sorted(unknown))}; pick from these"
        )
    chats = {name: some for name, some in tasks.items() if not task or name in task}
    shapes = by_drafter("tree", tree or (), [name for name in drafters if name not in NAMES])
    with console.status("loading the model") as status:
        plain = load(
            model,
            drafter="plain",
            dtype=dtype,
            max_slots=1,
            prefix_cache=False,  # prompts are repeated only to measure them again
            compilation_cache=compilation_cache,
        )
        engines = chains(plain, lengths, schedule, calibration)
        for name, found in shapes.items():
            for shape in found:
                engines[f"{name} {shape}"] = with_drafter(plain, name, tree=parse_tree(shape))
        measurements, measured = [], []
        for name, some in chats.items():
            measurements += measure(engines, {name: some}, settings, repeats=repeats, progress=status.update)
            best = max((m for m in measurements if m.task == name), key=lambda m: m.ratio)
            console.print(f"{name}: fastest {best.variant} ({best.ratio:.2f}x of plain)")
            if output is not None:  # a long run that is interrupted keeps what it has measured
                output.write_text(json.dumps(as_json(measurements, measured), indent=1))
        if costs:
            status.update("round costs")
            prompt = [1 + i % 97 for i in range(200)]

            def engine_for(length: int) -> Engine:
                fixed = simulated(draft_length=length, accept_lengths=(0,)) if length else "plain"
                return with_drafter(plain, fixed)

            measured = round_costs(engine_for, prompt, (1, 2, 3, 5, 7))
    console.print(measurement_table(measurements))
    console.print(round_table(measurements))
    for m in measurements:
        rounds, proposed, verified = m.counters.rounds, m.counters.proposed, m.counters.verified
        if proposed:
            room = f", with room for {m.counters.budget:.0f}" if m.counters.budget else ""
            console.print(
                f"{m.task}, {m.variant}: {rounds} rounds verified {verified} of {proposed} draft tokens, "
                f"{verified / rounds:.1f} each{room}"
            )
    for m in measurements:
        if m.looping:
            console.print(f"{m.task}: prompts {list(m.looping)} left out, their text is stuck in a loop")
    if measured:
        console.print(cost_table(measured))
        for name, engine in list(engines.items())[1:]:
            if engine.method.drafter.draft_depth < engine.method.drafter.draft_length:
                continue  # what was measured are chains
            total = add([m.counters for m in measurements if m.variant == name])
            length, gain = best_draft_length(measured, total)
            console.print(
                f"{name}: best draft length on these prompts {length} (expected {gain:.2f}x of plain)"
            )
    if output is not None:
        output.write_text(json.dumps(as_json(measurements, measured), indent=1))
        console.print(f"written to {output}")


def refuse(option: str, given: Mapping[str, object]) -> None:
    """Raises ValueError if one of these options, which would not be looked at, has been given, too."""
    for name, value in given.items():
        if value:
            raise ValueError(f"{name}: expected none with {option}, got {value}; drop one of them")


def by_drafter(option: str, values: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """What each drafter runs with.

    Args:
      option: to name in errors.
      values: "VALUE" for all of them, "DRAFTER=VALUE" for one.
      names: the drafters that the option is for.

    Raises:
      ValueError: a value for a drafter that is not among them, or for none.
    """
    if values and not names:
        raise ValueError(
            f"{option}: expected none without a checkpoint, got {', '.join(values)}; name the checkpoint with --drafter"
        )
    chosen: dict[str, list[str]] = {name: [] for name in names}
    for text in values:
        name, separator, value = text.rpartition("=")
        if separator and name not in chosen:
            raise ValueError(
                f"{option}: expected one of {list(names)} before the =, got {name!r}; name it with --drafter, too"
            )
        for one in [name] if separator else names:
            chosen[one].append(value)
    return chosen


def draft_tokens(text: str) -> int:
    """A draft length."""
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"draft_length: expected a number of tokens, got {text!r}; write N or DRAFTER=N")
    return int(text)


def show_simulation(console: Console, traces: Path | None, schedule: str | None) -> None:
    """Prints plain, full and scheduled verification of traces, at each cost curve and concurrency.

    A measured table has rounds of the draft length and up to the requests that it was measured with.
    """
    costs = None if schedule is None else load_costs(schedule)
    measured = costs if isinstance(costs, MeasuredCosts) else None
    if traces is not None:
        requests = load_traces(traces)
    else:
        requests = synthetic_traces(64, draft_length=measured.draft_length if measured else 7)
    draft_length, max_slots = requests[0].confidence.shape[1], 32
    if measured is not None:
        max_slots = max(lanes for lanes, _ in measured.decode_cells)
        if measured.draft_length != draft_length:
            raise ValueError(
                f"schedule: expected a cost table for the {draft_length} draft tokens of the traces, got one for "
                f"{measured.draft_length}; calibrate and profile the same drafter"
            )
    curves: dict[str, RoundCosts] = {name: curve_costs(name, draft_length) for name in CURVES}
    if costs is not None:
        curves = {str(schedule): costs}
    with console.status("simulating") as status:
        rows = {
            name: compare(
                requests,
                curve,
                [count for count in (1, 2, 4, 8, 16, 32) if count <= max_slots],
                max_slots=max_slots,
                progress=lambda text, name=name: status.update(f"{name}: {text}"),
            )
            for name, curve in curves.items()
        }
    console.print(simulation_table(rows))
