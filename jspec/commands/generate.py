"""`jspec generate`: decode prompts from the command line or a file."""

import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from jspec.commands.forms import (
    Choice,
    GrammarAfter,
    GrammarFile,
    JsonObject,
    JsonSchema,
    Regex,
    grammar_of,
)
from jspec.commands.options import (
    DEFAULT_CACHE,
    Calibration,
    CompilationCache,
    Drafter,
    Dtype,
    MaxContext,
    Model,
    Schedule,
    Tree,
)
from jspec.commands.prompt_files import Row, read_rows
from jspec.drafters.tree_shape import parse_tree
from jspec.engine import Engine
from jspec.loading import load
from jspec.prompts import Prompt
from jspec.settings import Settings


def generate(
    texts: Annotated[
        list[str] | None, typer.Argument(metavar="PROMPT", help="Texts, each a prompt of its own.")
    ] = None,
    model: Model = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", "-p", help="The same as PROMPT; may be given several times."),
    ] = None,
    file: Annotated[
        Path | None,
        typer.Option(help='JSON Lines with "prompt", "messages" or "ids", and optional "settings".'),
    ] = None,
    drafter: Drafter = "ngram",
    tree: Tree = None,
    schedule: Schedule = None,
    calibration: Calibration = None,
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
    json_schema: JsonSchema = None,
    json_object: JsonObject = False,
    regex: Regex = None,
    grammar: GrammarFile = None,
    choice: Choice = None,
    grammar_after: GrammarAfter = None,
    max_context: MaxContext = None,
    max_slots: Annotated[int, typer.Option(min=1, help="Prompts decoded together.")] = 4,
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
        grammar=grammar_of(
            json_schema=json_schema,
            json_object=json_object,
            regex=regex,
            file=grammar,
            choice=choice,
            after=grammar_after,
        ),
    )
    refuse_models(texts or (), others=bool(prompt or file))
    rows = [
        Row(origin=f"prompt {number}", prompt=text, settings=settings, is_text=True)
        for number, text in enumerate([*(texts or ()), *(prompt or ())], start=1)
    ]
    if file is not None:
        rows += read_rows(file, settings)
    if not rows:
        raise ValueError(
            'prompt: expected at least one, got none; write jspec generate "some text", or pass --file'
        )
    console = Console(stderr=True)
    with console.status("loading the model"):
        engine = load(
            model,
            drafter=drafter,
            tree=None if tree is None else parse_tree(tree),
            schedule=schedule,
            calibration=calibration,
            dtype=dtype,
            max_context=max_context,
            # A cost table holds for the number of slots that it was measured with.
            max_slots=max_slots if schedule else min(max_slots, len(rows)),
            compilation_cache=compilation_cache,
        )
    prompts = [as_prompt(row.prompt, chat) if row.is_text else row.prompt for row in rows]
    try:
        if stream and not as_json and len(rows) == 1:
            failures = print_stream(console, engine, prompts[0], rows[0].settings)
        else:
            failures = print_results(console, engine, rows, prompts, as_json)
    except ValueError as problem:
        raise ValueError(with_origin(str(problem), rows)) from problem
    for row, failure in zip(rows, failures, strict=True):
        if failure is not None:
            print(f"{row.origin}: {failure}", file=sys.stderr)
    if any(failures):
        raise typer.Exit(1)


def print_stream(console: Console, engine: Engine, prompt: Prompt, settings: Settings) -> list[str | None]:
    """Prints the text of one prompt as it is decoded; returns why it failed, None if it did not."""
    pieces = engine.stream([prompt], [settings])
    with console.status("the prompt; the first start of an engine also compiles its programs"):
        piece = next(pieces)
    print(piece.text, end="", flush=True)
    for piece in pieces:
        print(piece.text, end="", flush=True)
    print()
    return [_failure(piece.finish_reason)]


def print_results(
    console: Console, engine: Engine, rows: Sequence[Row], prompts: Sequence[Prompt], as_json: bool
) -> list[str | None]:
    """Decodes all prompts under a progress bar, then prints them; returns why each failed, or None."""
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("decoding; the first start also compiles", total=len(rows))
        results = engine.generate(
            prompts, [row.settings for row in rows], on_finish=lambda _: progress.advance(task)
        )
    for row, result in zip(rows, results, strict=True):
        if as_json:
            print(json.dumps(dataclasses.asdict(result)))
        else:
            print(f"{title(row) if len(rows) > 1 else ''}{result.text}\n")
    return [_failure(result.finish_reason) for result in results]


def _failure(finish_reason: str | None) -> str | None:
    return finish_reason if finish_reason is not None and finish_reason.startswith("error") else None


def title(row: Row) -> str:
    """A line that says which prompt an answer belongs to."""
    said: Any = row.prompt
    if not isinstance(said, str):
        # The last message of a chat, or the ids.
        said = said[-1].get("content", "") if isinstance(said[-1], dict) else f"ids {list(said)}"
    said = " ".join(str(said).split())
    return f"> {row.origin}: {said if len(said) <= 80 else f'{said[:77]}...'}\n"


def as_prompt(text: Any, chat: bool) -> Prompt:
    """A text as it is, or as the only message of a chat."""
    return [{"role": "user", "content": text}] if chat else text


def refuse_models(texts: Sequence[str], *, others: bool) -> None:
    """Raises ValueError for a text that names a model: that goes elsewhere on the command line.

    Args:
      texts: what was passed without an option.
      others: whether prompts came by an option as well, so that these are no likely prompts.
    """
    for text in texts:
        is_model = text.endswith(".gguf") or os.path.isfile(os.path.join(text, "config.json"))
        if is_model or (others and re.fullmatch(r"[\w.-]+/[\w.-]+", text)):
            raise ValueError(f"prompt: expected text, got the model {text!r}; pass it with --model")


def with_origin(message: str, rows: Sequence[Row]) -> str:
    """An error of the engine that names a prompt by its number, with the prompt's origin instead."""
    found = re.match(r"(?:prompts|settings)\[(\d+)\](\.)?", message)
    if found is None:
        return message
    return rows[int(found[1])].origin + (": " if found[2] else "") + message[found.end() :]
