"""`jspec check`: why a drafter is not accepted."""

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from jspec.commands.options import DEFAULT_CACHE, CompilationCache, Dtype
from jspec.loading import keep_compiled_programs
from jspec_train.check.finding import STEPS
from jspec_train.check.program import Extent, check
from jspec_train.check.subject import open_subject

_COLOURS = {"pass": "green", "fail": "bold red", "not checkable": "yellow"}


def check_command(
    target: Annotated[str, typer.Argument(help="Model folder, hub id or .gguf file.")],
    drafter: Annotated[
        str,
        typer.Argument(help="Folder or hub id of an EAGLE, EAGLE-3, P-EAGLE, DFlash or DFlash 2 drafter."),
    ],
    data: Annotated[
        Path | None,
        typer.Argument(
            help="Folder of samples that it was not trained on, from `jspec prepare` or `jspec capture`."
        ),
    ] = None,
    samples: Annotated[int, typer.Option(help="Samples to look at.")] = 8,
    tokens: Annotated[int, typer.Option(help="Answer tokens of each, and tokens to decode.")] = 48,
    decode: Annotated[bool, typer.Option("--decode/--no-decode", help="Also decode the prompts.")] = True,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File for all figures, those of every change tried as well.")
    ] = None,
    dtype: Dtype = "float32",
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Checks a drafter from data to decoding; ends with 1 if a step fails."""
    if compilation_cache:
        keep_compiled_programs(compilation_cache)
    extent = Extent(samples=samples, tokens=tokens, decode=decode)
    console = Console()
    progress = Console(stderr=True)
    with progress.status("opening") as status:
        subject = open_subject(target, drafter, data, dtype)
        verdict = check(subject, extent, dtype, lambda step: status.update(f"step {step}: {STEPS[step - 1]}"))
    for finding in verdict.findings:
        colour = _COLOURS[finding.status]
        line = (
            f"{finding.step:>2} {finding.name:<26} [{colour}]{finding.status:<13}[/] {escape(finding.said)}"
        )
        console.print(line, highlight=False, soft_wrap=True)
    console.print(f"This points to: {verdict.diagnosis}", markup=False, highlight=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(json.dumps(verdict.json(), indent=1) + "\n", encoding="utf-8")
    if verdict.failed:
        raise typer.Exit(1)
