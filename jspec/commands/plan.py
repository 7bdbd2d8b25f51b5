"""`jspec plan`: memory, collectives and bounds of time on TPUs that one does not have."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jspec.commands.options import DraftLength, Topology, Tree
from jspec.planning.estimate import (
    COLLECTIVE_SECONDS,
    USABLE,
    Estimate,
    break_even,
    estimate,
    tokens_that_fit,
    transient_bytes,
)
from jspec.planning.facts import Compiled, Request, compile_plan

GB = 1e9


def plan(
    target: Annotated[str, typer.Option(help="config.json of a target, or a folder with one.")],
    topology: Topology,
    drafter: Annotated[
        str,
        typer.Option(
            help='config.json of a drafter, or a folder with one (EAGLE: with its weights); "ngram"; "plain".'
        ),
    ] = "plain",
    tensor: Annotated[int, typer.Option(min=1, help="Devices that share heads, MLP and vocabulary.")] = 1,
    slots: Annotated[int, typer.Option(min=1, help="Requests that the engine holds.")] = 16,
    context: Annotated[int, typer.Option(min=2, help="Tokens of each of them.")] = 4096,
    lanes: Annotated[
        int | None, typer.Option(min=1, help="Requests in the rounds that are compiled; default all slots.")
    ] = None,
    draft_length: DraftLength = None,
    tree: Tree = None,
    chunk: Annotated[int, typer.Option(min=1, help="Prompt tokens of a prefill round.")] = 511,
    page_size: Annotated[int, typer.Option(min=1)] = 128,
    dtype: Annotated[str, typer.Option(help="Of weights and cache: bfloat16 or float32.")] = "bfloat16",
    collective_microseconds: Annotated[
        float, typer.Option(min=0, help="Assumed latency of a collective.")
    ] = COLLECTIVE_SECONDS * 1e6,
) -> None:
    """Compiles the programs of an engine for TPUs that need not be there, and says what they would need."""
    request = Request(
        target=target,
        drafter=drafter,
        topology=topology,
        tensor=tensor,
        dtype=dtype,
        slots=slots,
        context=context,
        lanes=lanes or slots,
        chunk=chunk,
        page_size=page_size,
        draft_length=draft_length,
        tree=tree,
    )
    console = Console()
    with console.status("compiling"):
        compiled = compile_plan(request)
    console.print(memory_table(compiled, request))
    console.print(program_table(compiled))
    console.print(time_table(compiled, request, collective_microseconds * 1e-6))


def memory_table(compiled: Compiled, request: Request) -> Table:
    """What lies on one device: arrays and programs by the compiler, what fits besides as an estimate."""
    resident, chip = compiled.resident, compiled.resident.chip
    tokens = request.slots * -(-request.context // request.page_size) * request.page_size
    transient = transient_bytes(compiled)
    table = Table(title=f"memory of each of {request.tensor} x {chip.kind}", title_justify="left")
    table.add_column("what")
    table.add_column("GB", justify="right")
    table.add_column("source")
    rows = [
        (f"target ({resident.target_identity})", resident.target_bytes, "fact"),
        (f"drafter ({request.drafter})", resident.drafter_bytes, "fact"),
        (f"pages for {tokens:,} tokens", resident.pool_bytes + resident.drafter_pool_bytes, "fact"),
        ("texts, settings and counts of the slots", resident.other_bytes, "fact"),
        ("programs: temporary, and between them", transient, "fact"),
        ("there is", chip.memory_bytes, "JAX's table of TPUs"),
    ]
    for what, size, source in rows:
        table.add_row(what, f"{size / GB:.3f}", source)
    fits = tokens_that_fit(compiled, tokens)
    table.add_row(
        f"tokens of context that fit: {fits:,}",
        "",
        f"estimate: {USABLE:.0%} of memory less all but the pages",
    )
    return table


def program_table(compiled: Compiled) -> Table:
    """The compiler's facts about each program."""
    table = Table(title="programs: facts of the compiler, per device", title_justify="left")
    for column in (
        "round",
        "program",
        "temporary MB",
        "collectives",
        "their MB",
        "GFLOP",
        "bytes accessed MB",
    ):
        table.add_column(column, justify="left" if column in ("round", "program", "collectives") else "right")
    for name, programs in compiled.programs.items():
        for kind, program in programs.items():
            table.add_row(
                name,
                kind,
                f"{program.temporary_bytes / 1e6:.1f}",
                ", ".join(f"{count} {what}" for what, count in program.collectives.items()) or "none",
                f"{program.collective_bytes / 1e6:.2f}",
                f"{program.flops / GB:.1f}",
                f"{program.accessed_bytes / 1e6:.0f}",
            )
    table.caption_justify = "left"
    table.caption = (
        "As the compiler counts: loops once, every branch (a greedy batch takes few of settle's), copies into fast "
        "memory too, kernels as they declare themselves."
    )
    return table


def time_table(compiled: Compiled, request: Request, collective_seconds: float) -> Table:
    """Bounds of each round against the chip's roofline, and where speculation breaks even."""
    resident, chip = compiled.resident, compiled.resident.chip
    share = {"prefill": 1 / request.slots}
    rounds: dict[str, list[Estimate]] = {
        name: [
            estimate(
                program,
                kind,
                resident,
                context_share=share.get(name, request.lanes / request.slots),
                collective_seconds=collective_seconds,
            )
            for kind, program in programs.items()
        ]
        for name, programs in compiled.programs.items()
    }
    table = Table(
        title=f"rounds: estimates of the least time, {request.lanes} lanes with {request.context:,} tokens each",
        title_justify="left",
    )
    for column in (
        "round",
        "MB",
        "memory ms",
        "GFLOP",
        "compute ms",
        "collectives ms",
        "at least ms",
        "bound",
    ):
        table.add_column(column, justify="left" if column in ("round", "bound") else "right")
    for name, parts in rounds.items():
        memory, compute = sum(p.memory_seconds for p in parts), sum(p.compute_seconds for p in parts)
        collectives = sum(p.collective_seconds for p in parts)
        bounds = {"memory": memory, "compute": compute, "collectives": collectives}
        table.add_row(
            name,
            f"{sum(p.bytes_read for p in parts) / 1e6:.0f}",
            f"{memory * 1e3:.3f}",
            f"{sum(p.flops for p in parts) / GB:.1f}",
            f"{compute * 1e3:.3f}",
            f"{collectives * 1e3:.3f}",
            f"{sum(p.seconds for p in parts) * 1e3:.3f}",
            max(bounds, key=lambda b: bounds[b]),
        )
    lines = [
        f"{chip.bytes_per_second / GB:.0f} GB/s and {chip.flops_per_second / 1e12:.0f} TFLOP/s (JAX's table of TPUs), "
        f"{collective_seconds * 1e6:g} us per collective (assumed), what must be read read once; the host's time, "
        "overlap and what kernels lose are not in it."
    ]
    if "speculative" in rounds:
        plain, speculative = (sum(p.seconds for p in rounds[name]) for name in ("plain", "speculative"))
        found = break_even(plain, speculative, resident.draft_depth)
        acceptance = (
            "which no acceptance reaches"
            if found.acceptance is None
            else f"an acceptance of {found.acceptance:.2f} per draft token"
        )
        lines.append(
            f"Break-even (estimate): {found.ratio:.2f} tokens committed per round, {acceptance}, of at most "
            f"{resident.draft_depth + 1}."
        )
    table.caption = " ".join(lines)
    table.caption_justify = "left"
    return table
