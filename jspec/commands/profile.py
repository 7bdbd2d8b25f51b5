"""`jspec profile`: what rounds cost on this machine."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jspec.bench.profile import break_even_concurrency, gains, profile
from jspec.bench.prompts import chats_by_task
from jspec.bench.table import NARROW
from jspec.commands.options import DEFAULT_CACHE, CompilationCache, DraftLength, Dtype, Model
from jspec.loading import load
from jspec.results import add
from jspec.schedule.costs import MOST_SPREAD, MeasuredCosts, save_costs
from jspec.settings import Settings


def profile_command(
    drafter: Annotated[list[str], typer.Option(help="May be given several times.")],
    model: Model = None,
    draft_length: DraftLength = None,
    dtype: Dtype = "float32",
    max_slots: Annotated[int, typer.Option(min=1, help="Most requests at a time.")] = 8,
    context: Annotated[int, typer.Option(min=1, help="Tokens per request when a round is timed.")] = 64,
    max_context: Annotated[int, typer.Option(help="Of the engine that is measured.")] = 1024,
    repeats: Annotated[int, typer.Option(min=2, help="Interleaved; medians are kept.")] = 5,
    rounds: Annotated[int, typer.Option(min=1, help="Timed per kind of round and repeat.")] = 4,
    output: Annotated[
        Path | None, typer.Option(help="Folder for a cost table per drafter; left out: only shown.")
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help='JSON Lines with "prompt" or "messages", to see how much is accepted. Left out: built-in ones.'
        ),
    ] = None,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Times rounds over lanes, verified nodes, prompt chunks and context, and says when drafting pays."""
    if output is not None and (output.exists() and not output.is_dir()):
        raise ValueError(f"output: expected a folder, got the file {str(output)!r}; name another")
    tasks = chats_by_task(prompts)
    console, noisy = Console(), []
    for name in drafter:
        with console.status(f"{name}: loading") as status:
            engine = load(
                model,
                drafter=name,
                draft_length=draft_length,
                dtype=dtype,
                max_slots=max_slots,
                max_context=max_context,
                prefix_cache=False,
                compilation_cache=compilation_cache,
            )
            costs = profile(
                engine, dtype=dtype, context=context, repeats=repeats, rounds=rounds, progress=status.update
            )
            status.update(f"{name}: how much is accepted")
            chats = [chat for group in tasks.values() for chat in group]
            counters = add([r.counters for r in engine.generate(chats, Settings(max_tokens=48))])
        console.print(rounds_table(name, costs))
        acceptance = counters.acceptance_by_position()
        best = gains(costs, acceptance)
        for lanes, (nodes, gain) in best.items():
            console.print(
                f"{name}: {lanes} requests: "
                + (f"{nodes} nodes per round, {gain:.2f}x of plain" if gain > 1 else "plain is faster")
            )
        most = break_even_concurrency(costs, counters)
        console.print(
            f"{name}: drafting pays "
            + ("at no concurrency" if most is None else f"up to {most} requests at a time")
            + f" (measured to {max(best)}), with {1 + sum(acceptance):.2f} tokens per drafting round on "
            + ("built-in prompts" if prompts is None else prompts.name)
        )
        if costs.noisy:
            noisy.append(name)
            console.print(
                f"{name}: {len(costs.noisy)} of {len(costs.cells)} kinds of rounds differ by more than "
                f"{MOST_SPREAD:.0%} in half of the repeats: not a table to decide on"
            )
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
            path = output / f"{Path(name).name}.json"
            save_costs(costs, path)  # refuses a noisy one
            console.print(f"written to {path}")
    if noisy:
        raise ValueError(
            f"profile: expected a quiet machine, got noisy times for {', '.join(noisy)}; stop what else runs, "
            "or raise repeats and rounds"
        )


def rounds_table(name: str, costs: MeasuredCosts) -> Table:
    """One row per kind of round."""
    table = Table(**NARROW, title=f"{name}: seconds per round on {costs.hardware}")
    for heading in ("lanes", "nodes", "chunk", "context", "ms", "spread", "tokens per lane to break even"):
        table.add_column(heading, justify="right")
    ratios = costs.break_even()
    for cell in costs.cells:
        ratio = ratios.get(cell.lanes, {}).get(cell.nodes) if cell.chunk == 0 else None
        table.add_row(
            *(str(v) for v in (cell.lanes, cell.nodes, cell.chunk, cell.context)),
            f"{cell.seconds * 1e3:.2f}",
            f"{cell.spread:.0%}",
            "-" if ratio is None else f"{ratio:.2f}",
        )
    return table
