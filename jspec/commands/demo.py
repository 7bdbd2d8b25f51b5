"""`jspec demo`: the same prompts plain and speculative, streamed, and a table at the end."""

import time
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text as Rich

from jspec.bench.calls import CALLS
from jspec.bench.prompts import PROMPTS as PROMPTS_BY_TASK
from jspec.bench.prompts import asked
from jspec.commands.options import DEFAULT_CACHE, CompilationCache, Drafter, Model
from jspec.engine import Engine
from jspec.loading import load, with_drafter
from jspec.results import Counters, Result, add
from jspec.settings import Settings
from jspec.timings import Timings

PROMPTS = (PROMPTS_BY_TASK["chat"][0], PROMPTS_BY_TASK["rewrite"][2], PROMPTS_BY_TASK["code"][1])


def demo(
    model: Model = None,
    drafter: Drafter = "ngram",
    calls: Annotated[
        str | None,
        typer.Option(help="Folder of a drafter for JSON function calls; decodes some with it, too."),
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens per answer.")] = 128,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Decodes built-in prompts with and without a drafter and compares speed and tokens."""
    console = Console()
    settings = Settings(max_tokens=max_tokens)
    with console.status("loading the model"):
        plain = load(
            model,
            drafter="plain",
            compilation_cache=compilation_cache,
            max_slots=1,
            prefix_cache=False,  # prompts are repeated only to be timed: a hit would need other programs
        )
        engines = {"plain": plain, drafter: with_drafter(plain, drafter)}
    chats = [asked(prompt) for prompt in PROMPTS]
    same = section(console, engines, chats, settings)
    if calls is not None:
        with console.status("loading the drafter for function calls"):
            engines["trained"] = with_drafter(plain, calls)
        console.print()
        console.rule("[bold]JSON function calls, with a drafter trained for them")
        same = section(console, engines, CALLS, settings) and same
    console.print(
        Rich(
            "One pass each: speeds differ by some percent from pass to pass, and by more on a busy machine. "
            "jspec bench interleaves repeats and gives medians.",
            style="dim",
        )
    )
    if not same:
        raise typer.Exit(1)


def section(
    console: Console, engines: Mapping[str, Engine], chats: Sequence[list[dict[str, str]]], settings: Settings
) -> bool:
    """Decodes the same chats with every engine and compares; whether all texts are those of the first."""
    for name, engine in engines.items():
        with console.status(f"a first, untimed pass with {name}; the first start also compiles its programs"):
            engine.generate(chats, settings)
    console.print(
        Rich.assemble(
            "Text of the target: ", ("drafted and accepted", "bold green"), " or ", "its own choice", ".\n"
        )
    )
    rows = []
    for name, engine in engines.items():
        console.rule(f"[bold]{name}")
        seconds = 0.0
        for chat in chats:
            console.print()
            console.print(quoted(chat[-1]["content"]))
            seconds += show(console, engine, chat, settings)
        timings = Timings()
        with console.status("the same once more, timed part by part"):
            results = engine.generate(chats, settings, timings=timings)
        rows.append((name, seconds, results, timings))
    console.print()
    console.print(comparison(rows))
    texts = [[result.token_ids for result in results] for _, _, results, _ in rows]
    same = all(text == texts[0] for text in texts)
    console.print(f"tokens identical: {'yes' if same else 'NO'}")
    return same


def quoted(prompt: str) -> Rich:
    """A whole prompt, every line of it marked as one."""
    return Rich("\n".join(f"> {line}" for line in prompt.splitlines()), style="dim")


def show(console: Console, engine: Engine, chat: list[dict[str, str]], settings: Settings) -> float:
    """Streams one answer and returns the seconds it took, printing included."""
    start = time.perf_counter()
    for piece in engine.stream([chat], settings):
        style = "bold green" if any(piece.drafted) else ""
        console.print(Rich(piece.text, style=style), end="")
    console.print()
    return time.perf_counter() - start


def comparison(rows: list[tuple[str, float, list[Result], Timings]]) -> Table:
    """Speed, acceptance and where the time went."""
    table = Table()
    for heading in ("", "tokens/s", "ratio", "mean commit length", "draft", "target", "rest"):
        table.add_column(heading, justify="right" if heading else "left")
    base = None
    for name, seconds, results, timings in rows:
        counters: Counters = add([r.counters for r in results])
        speed = counters.emitted / seconds
        base = base or speed
        table.add_row(
            name,
            f"{speed:.1f}",
            f"{speed / base:.2f}x",
            f"{counters.mean_commit_length or 0:.2f}",
            *(f"{timings.shares[part]:.0%}" for part in ("draft", "target", "rest")),
        )
    return table
