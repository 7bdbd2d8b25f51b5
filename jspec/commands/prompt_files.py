"""Prompts of a JSON Lines file, each with its own settings."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jspec.prompts import Prompt, checked
from jspec.settings import Settings, settings_from_json
from jspec.text.file import read_text

KINDS = ("prompt", "messages", "ids")
ALLOWED = (*KINDS, "settings", "task")  # "task" is read by `jspec bench`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One prompt of the command, and where it came from."""

    origin: str  # "prompts.jsonl:3"
    prompt: Prompt
    settings: Settings
    is_text: bool = False  # plain text, not chat messages or ids


def read_rows(path: Path, settings: Settings) -> list[Row]:
    """The file's prompts, each with the command's settings and its own on top.

    Raises:
      ValueError: the file cannot be read, or a line is no prompt or has a setting that is wrong.
    """
    text = read_text("file", path, expected="JSON Lines")
    rows = []
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            origin = f"{path}:{number}"
            try:
                rows.append(_row(origin, line, settings))
            except ValueError as problem:
                raise ValueError(f"{origin}: {problem}") from problem
    if not rows:
        raise ValueError(f"file: expected at least one prompt, got none in {path}; write one object per line")
    return rows


def _row(origin: str, line: str, settings: Settings) -> Row:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as problem:
        raise ValueError(
            f"expected one JSON object, got {line.strip()[:60]!r} ({problem.msg} at character {problem.pos + 1}); "
            "write one object per line"
        ) from problem
    if not isinstance(row, dict):
        raise ValueError(f'expected an object, got {line.strip()[:60]!r}; write {{"prompt": ...}}')
    kinds = [kind for kind in KINDS if kind in row]
    if len(kinds) != 1:
        wanted = ", ".join(f'"{kind}"' for kind in KINDS)
        keys = ", ".join(f'"{key}"' for key in row) or "no key"
        raise ValueError(f"expected one of {wanted}, got {keys}; give each line one prompt")
    unknown = ", ".join(f'"{key}"' for key in row if key not in ALLOWED)
    if unknown:
        raise ValueError(
            f'expected no keys but "{kinds[0]}", "settings" and "task", got {unknown}; remove them'
        )
    return Row(
        origin=origin,
        prompt=_prompt(kinds[0], row[kinds[0]]),
        settings=settings_from_json(row.get("settings", {}), settings),
        is_text=kinds[0] == "prompt",
    )


def _prompt(kind: str, value: Any) -> Prompt:
    wanted = {"prompt": "text", "messages": "a list of chat messages", "ids": "a list of token ids"}[kind]
    if kind == "prompt":
        right = isinstance(value, str)
    elif kind == "messages":
        right = isinstance(value, list) and any(isinstance(item, dict) for item in value)
    else:
        right = isinstance(value, list) and not any(isinstance(item, dict) for item in value)
    if not right:
        raise ValueError(f"{kind}: expected {wanted}, got {json.dumps(value)[:60]}; change it")
    try:
        return checked(0, value)
    except ValueError as problem:
        raise ValueError(str(problem).replace("prompts[0]", kind, 1)) from problem
