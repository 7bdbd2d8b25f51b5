"""`jspec generate`: decode prompts from the command line or a file."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress

from jspec.commands.options import DEFAULT_CACHE, CompilationCache, Drafter, Dtype, Model
from jspec.engine import Engine
from jspec.loading import load
from jspec.results import Result
from jspec.settings import Settings


def generate(
    model: Model = None,
    prompt: Annotated[
        list[str] | None, typer.Option("--prompt", "-p", help="May be given several times.")
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help='JSON Lines with "prompt", "messages" or "ids", and optional "settings".'),
    ] = None,
    drafter: Drafter = "ngram",
    dtype: Dtype = "float32",
    chat: Annotated[bool, typer.Option(help="Put text through the model's chat template.")] = True,
    stream: Annotated[bool, typer.Option(help="Print the text of a single prompt as it is decoded.")] = True,
    as_json: Annotated[
        bool, typer.Option("--json", help="One JSON object per prompt instead of text.")
    ] = False,
    max_tokens: Annotated[int, typer.Option()] = 256,
    temperature: Annotated[float, typer.Option(help="0 = greedy.")] = 0.0,
    top_k: Annotated[int | None, typer.Option()] = None,
    top_p: Annotated[float, typer.Option()] = 1.0,
    min_p: Annotated[float, typer.Option()] = 0.0,
    repetition_penalty: Annotated[float, typer.Option()] = 1.0,
    seed: Annotated[int | None, typer.Option(help="Same seed, same text, with or without a drafter.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string; may be given several times.")] = None,
    max_context: Annotated[int | None, typer.Option(help="Tokens of prompt and answer.")] = None,
    max_slots: Annotated[int, typer.Option(help="Prompts decoded together.")] = 4,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Decodes prompts and prints the answers."""
    settings = Settings(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
        stop=tuple(stop or ()),
    )
    prompts, per_prompt = [], []
    for text in prompt or ():
        prompts.append(as_prompt(text, chat))
        per_prompt.append(settings)
    if file is not None:
        for item, own in read_rows(file, chat, settings):
            prompts.append(item)
            per_prompt.append(own)
    if not prompts:
        raise ValueError("prompt: expected at least one, got none; pass --prompt or --file")
    engine = load(
        model,
        drafter=drafter,
        dtype=dtype,
        max_context=max_context,
        max_slots=min(max_slots, len(prompts)),
        compilation_cache=compilation_cache,
    )
    if stream and not as_json and len(prompts) == 1:
        for piece in engine.stream(prompts, per_prompt):
            print(piece.text, end="", flush=True)
        print()
        return
    for result in with_progress(engine, prompts, per_prompt):
        print(json.dumps(dataclasses.asdict(result)) if as_json else f"{result.text}\n")


def with_progress(engine: Engine, prompts: list[Any], settings: list[Settings]) -> list[Result]:
    """Decodes with a progress bar on standard error."""
    from rich.console import Console

    with Progress(console=Console(file=sys.stderr), transient=True) as progress:
        task = progress.add_task("decoding", total=len(prompts))
        return engine.generate(prompts, settings, on_finish=lambda _: progress.advance(task))


def as_prompt(text: str, chat: bool) -> Any:
    """A text as it is, or as the only message of a chat."""
    return [{"role": "user", "content": text}] if chat else text


def read_rows(path: Path, chat: bool, settings: Settings) -> list[tuple[Any, Settings]]:
    """Prompts of a JSON Lines file, each with the command's settings and its own on top.

    Raises:
      ValueError: a line without a prompt, or with a setting that does not exist.
    """
    rows = []
    for number, line in enumerate(path.read_text("utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            item = next(row[key] for key in ("messages", "ids", "prompt") if key in row)
            own = dataclasses.replace(settings, **row.get("settings", {}))
        except (json.JSONDecodeError, TypeError, StopIteration, AttributeError) as problem:
            raise ValueError(
                f'{path}:{number}: expected an object with "prompt", "messages" or "ids" and known "settings", '
                f"got {line[:60]!r} ({problem})"
            ) from problem
        rows.append((as_prompt(item, chat) if isinstance(item, str) else item, own))
    return rows
