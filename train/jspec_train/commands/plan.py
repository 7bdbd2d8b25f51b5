"""`jspec plan-train`: a training step on TPUs that one does not have."""

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from jspec.commands.options import Topology
from jspec.planning.estimate import COLLECTIVE_SECONDS
from jspec_train.plan_step import CompiledStep, StepRequest, compile_step


def plan_train_command(
    target: Annotated[str, typer.Option(help="config.json of a target, or a folder with one.")],
    drafter: Annotated[str, typer.Option(help="config.json of a DFlash or DFlash 2 drafter, or its folder.")],
    topology: Topology,
    data: Annotated[int, typer.Option(min=1, help="Devices that have rows of their own.")] = 1,
    tensor: Annotated[int, typer.Option(min=1, help="Devices that share the target's vocabulary.")] = 1,
    rows: Annotated[int, typer.Option(min=1, help="Rows of a batch, over all devices.")] = 8,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of a row.")] = 2048,
    num_anchors: Annotated[int, typer.Option(min=1, help="Blocks of a row.")] = 512,
    dtype: Annotated[str, typer.Option(help="Of weights and features.")] = "bfloat16",
) -> None:
    """Compiles an update on stored features for TPUs that need not be there, and says what it would need."""
    request = StepRequest(
        target=target,
        drafter=drafter,
        topology=topology,
        data=data,
        tensor=tensor,
        rows=rows,
        tokens=tokens,
        num_anchors=num_anchors,
        dtype=dtype,
    )
    console = Console()
    with console.status("compiling"):
        step = compile_step(request)
    console.print(step_table(step, request))


def step_table(step: CompiledStep, request: StepRequest) -> Table:
    """Facts, then estimates."""
    chip, program = step.chip, step.program
    title = f"an update on {request.data} x {request.tensor} {chip.kind}: {request.rows} x {request.tokens} tokens"
    table = Table(title=title, title_justify="left")
    for column in ("what, per device", "value", "source"):
        table.add_column(column)
    held = program.argument_bytes + program.output_bytes - program.aliased_bytes + program.temporary_bytes
    collectives = sum(program.collectives.values())
    latency = collectives * COLLECTIVE_SECONDS
    memory = program.accessed_bytes / chip.bytes_per_second
    compute = program.flops / chip.flops_per_second
    rows = [
        ("masters and moments", f"{step.state_bytes / 1e9:.3f} GB", "fact"),
        ("target, of which the step reads embedding and head", f"{step.target_bytes / 1e9:.3f} GB", "fact"),
        ("batch with features", f"{step.batch_bytes / 1e9:.3f} GB", "fact"),
        ("temporary", f"{program.temporary_bytes / 1e9:.3f} GB", "fact"),
        (
            "all of it",
            f"{held / 1e9:.3f} GB of {chip.memory_bytes / 1e9:.1f}",
            "fact, of JAX's table of TPUs",
        ),
        (
            "collectives",
            ", ".join(f"{count} {what}" for what, count in program.collectives.items()) or "none",
            f"fact; they return {program.collective_bytes / 1e6:.1f} MB",
        ),
        (
            "work",
            f"{program.flops / 1e12:.2f} TFLOP, {program.accessed_bytes / 1e9:.1f} GB accessed",
            "fact, as the compiler counts: what a loop repeats counts once",
        ),
        (
            "at least",
            f"{max(memory, compute) + latency:.4f} s ({'memory' if memory > compute else 'compute'})",
            f"estimate from that count, so too little where loops run; {COLLECTIVE_SECONDS * 1e6:g} us a collective assumed",
        ),
    ]
    for row in rows:
        table.add_row(*row)
    return table
