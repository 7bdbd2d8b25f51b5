"""`jspec batch`: a file of requests in OpenAI's batch format."""

import asyncio
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress

from jspec.commands.options import (
    DEFAULT_CACHE,
    Calibration,
    CompilationCache,
    Drafter,
    Dtype,
    GrammarMode,
    MaxContext,
    Overlap,
    Schedule,
    Tree,
)
from jspec.drafters.tree_shape import parse_tree
from jspec.grammar.overlap import resolve_overlap
from jspec.loading import load
from jspec_serve.batch import CALLS_PER_SLOT, BatchRow, read_batch, run_batch, take_up
from jspec_serve.commands.serve import MaxSlots, Name, Target, name_of
from jspec_serve.limits import Limits
from jspec_serve.service import Service

MAX_CHOICES = 1024  # n times prompts of one row


def batch_command(
    requests: Annotated[Path, typer.Argument(help="JSON Lines: custom_id, method, url and body.")],
    output: Annotated[Path, typer.Argument(help="Answers; what is there already is not asked again.")],
    target: Target = None,
    drafter: Drafter = "ngram",
    tree: Tree = None,
    schedule: Schedule = None,
    calibration: Calibration = None,
    dtype: Dtype = "float32",
    name: Name = None,
    max_slots: MaxSlots = 8,
    max_context: MaxContext = None,
    overlap: Overlap = True,
    grammar_overlap: GrammarMode = None,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Answers a file of requests; started again after it was stopped, it goes on where it was."""
    rows = read_batch(requests)
    name = name or name_of(target)
    mode = resolve_overlap(grammar_overlap, None, overlap=overlap)
    check_models(rows, name)
    done = take_up(output)
    left = [row for row in rows if row.custom_id not in done]
    console = Console(stderr=True)
    if done:
        console.print(f"{len(rows) - len(left)} of {len(rows)} are answered already")
    if not left:
        return
    with console.status("loading the model"):
        engine = load(
            target,
            drafter=drafter,
            tree=None if tree is None else parse_tree(tree),
            schedule=schedule,
            calibration=calibration,
            dtype=dtype,
            max_context=max_context,
            max_slots=max_slots,
            grammar_overlap=mode,
            overlap=overlap,
            compilation_cache=compilation_cache,
        )
    # Room for all that the workers ask for together: nobody is there to try again after a 429.
    most_waiting = CALLS_PER_SLOT * engine.max_slots * MAX_CHOICES
    service = Service(engine, name=name, limits=Limits(max_waiting=most_waiting, max_choices=MAX_CHOICES))
    failed = 0
    with output.open("a") as file, Progress(console=console, transient=True) as progress:
        task = progress.add_task("decoding; the first start also compiles", total=len(left))

        def on_answer(status: int) -> None:
            nonlocal failed
            failed += status != 200
            progress.advance(task)

        service.start()
        try:
            asyncio.run(run_batch(service, left, file, on_answer))
        finally:
            service.stop()
    if failed:
        print(f"{failed} of {len(left)} requests failed; {output} tells why", file=sys.stderr)
        raise typer.Exit(1)


def check_models(rows: list[BatchRow], name: str) -> None:
    """Raises ValueError for requests to another model, before anything is loaded."""
    for row in rows:
        if row.body.get("model") != name:
            raise ValueError(
                f"{row.custom_id}: expected model {name!r}, got {row.body.get('model')!r:.60}; correct it or pass --name"
            )
