"""Options that say what an answer must look like."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from jspec.grammar.grammar import Grammar
from jspec.text.file import read_text

JsonSchema = Annotated[Path | None, typer.Option(help="File with a JSON schema that the answer fits.")]
JsonObject = Annotated[bool, typer.Option("--json-object", help="The answer is a JSON object.")]
Regex = Annotated[str | None, typer.Option(help="Regular expression that the whole answer matches.")]
GrammarFile = Annotated[
    Path | None, typer.Option(help="File with a grammar: .lark, or llama.cpp's .ebnf or .gbnf.")
]
Choice = Annotated[list[str] | None, typer.Option(help="A possible answer; give it several times.")]
GrammarAfter = Annotated[
    str | None, typer.Option(help='The form begins behind this text, such as "</think>".')
]


def grammar_of(
    *,
    json_schema: Path | None,
    json_object: bool,
    regex: str | None,
    file: Path | None,
    choice: Sequence[str] | None,
    after: str | None,
) -> Grammar | None:
    """The grammar of the options; None = free text.

    Raises:
      ValueError: a file cannot be read or holds no schema, or there are two forms.
    """
    given: dict[str, Any] = {}
    if json_schema is not None:
        text = read_text("json_schema", json_schema, expected="text")
        try:
            given["json_schema"] = json.loads(text)
        except ValueError as problem:
            raise ValueError(
                f"json_schema: expected JSON in {json_schema}, got {problem}; correct it"
            ) from problem
    if json_object:
        given["json_object"] = True
    if file is not None:
        kind = {".lark": "lark", ".ebnf": "ebnf", ".gbnf": "ebnf"}.get(file.suffix)
        if kind is None:
            raise ValueError(
                f"grammar: expected a .lark, .ebnf or .gbnf file, got {str(file)!r}; rename it by its syntax"
            )
        given[kind] = read_text("grammar", file, expected="text")
    if regex is not None:
        given["regex"] = regex
    if choice:
        given["choice"] = choice
    if not given and after is None:
        return None
    return Grammar(after=after, **given)
