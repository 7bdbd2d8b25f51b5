"""Answers prompts with the target itself, so that a drafter learns what the target really says.

JSON Lines in, JSON Lines out: a row is written when its answer is finished, and what the output already holds
is skipped, so a run may be stopped at any time and started again. An answer depends on its row, the target and
the settings, not on the rows that happen to be decoded beside it.
"""

import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.engine import Engine
from jspec.settings import Settings
from jspec.text.tokenizer import Tokenizer

WINDOW = 4096  # rows that are held in memory at a time
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tally:
    """How far a regeneration is; `answered`, `failed` and `skipped` add up to `rows` when it is through."""

    rows: int
    answered: int = 0  # in this run
    failed: int = 0  # see the errors file
    skipped: int = 0  # the output had them already
    tokens: int = 0  # of the answers of this run, end of turn included
    cut: int = 0  # answers of this run that max_tokens ended
    reused: int = 0  # prompt tokens that the prefix cache had, as rows began alike


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One row that can be answered."""

    id: str
    row: Mapping[str, Any]
    messages: tuple[Mapping[str, Any], ...]
    prompt_ids: tuple[int, ...]


def regenerate(
    engine: Engine,
    source: str | Path,
    out: str | Path,
    settings: Settings,
    *,
    on_progress: Callable[[Tally], None] = lambda _: None,
) -> Tally:
    """Answers every row of `source` that `out` does not have yet.

    A row has "messages" or "conversations" (role and content, or from and value) and may have "id" and
    other columns, which are kept. Its last message is answered; an answer it already ends with is replaced,
    earlier ones stay. `out` gets the row with "conversations" (answer included) and "finish_reason"; rows that
    cannot be answered go to `errors_file(out)` with the reason, which each run writes anew.

    Args:
      engine: of the target; a drafter changes the speed, not the answers.
      source: JSON Lines.
      out: JSON Lines, appended to.
      settings: of every answer. With a temperature, each row gets a seed made of its id and `settings.seed`.
      on_progress: called after each row.

    Raises:
      ValueError: `out` was made from other settings or another target, or the engine has no tokenizer.
    """
    source, out = Path(source), Path(out)
    if engine.tokenizer is None:
        raise ValueError("engine: expected one with a tokenizer, got none; load it from the model's folder")
    _check_provenance(out, provenance(engine, settings))
    done = _finished_ids(out)
    tally = Tally(rows=sum(1 for _ in _lines(source)))
    seen: dict[str, int] = {}
    with out.open("a", encoding="utf-8") as answers, errors_file(out).open("w", encoding="utf-8") as errors:
        window: list[Job] = []

        def fail(number: int, id_: str | None, reason: str) -> None:
            nonlocal tally
            _write(errors, {"line": number, "id": id_, "error": reason})
            tally = dataclasses.replace(tally, failed=tally.failed + 1)
            on_progress(tally)

        def answer_window() -> None:
            nonlocal tally
            for job, text, finish_reason, tokens, reused in _answers(engine, window, settings):
                if finish_reason.startswith("error"):
                    fail(seen[job.id], job.id, finish_reason)
                    continue
                _write(answers, answered_row(job, text, finish_reason))
                tally = dataclasses.replace(
                    tally,
                    answered=tally.answered + 1,
                    tokens=tally.tokens + tokens,
                    cut=tally.cut + (finish_reason == "length"),
                    reused=tally.reused + reused,
                )
                on_progress(tally)
            window.clear()

        for number, line in _lines(source):
            id_ = None
            try:
                row = _row(line)
                id_ = str(row["id"]) if "id" in row else None
                messages = prompt_messages(row)
                id_ = row_id(row, messages)
                if id_ in seen:
                    raise ValueError(
                        f"id: expected one row each, got {id_!r} in line {seen[id_]}, too; drop one"
                    )
                seen[id_] = number
                if id_ in done:
                    tally = dataclasses.replace(tally, skipped=tally.skipped + 1)
                    continue
                window.append(
                    Job(id=id_, row=row, messages=messages, prompt_ids=_ids(engine, messages, settings))
                )
            except ValueError as problem:
                fail(number, id_, str(problem))
            if len(window) == WINDOW:
                answer_window()
        answer_window()
    return tally


def errors_file(out: Path) -> Path:
    """Where the rows are listed that could not be answered."""
    return out.with_suffix(".errors.jsonl")


def provenance_file(out: Path) -> Path:
    """What made the answers, beside them."""
    return out.with_suffix(".regeneration.json")


def provenance(engine: Engine, settings: Settings) -> dict[str, Any]:
    """What an answer depends on, besides its row."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    template = tokenizer.chat_templates.get("default", "")
    asked = {
        field.name: value
        for field in dataclasses.fields(Settings)
        if (value := getattr(settings, field.name)) != field.default and value not in ((), {})
    }
    return {
        "target": engine.method.target.identity,
        "tokenizer": tokenizer.identity,
        "chat_template": hashlib.sha256(template.encode()).hexdigest(),
        "settings": json.loads(json.dumps(asked)),
    }


def prompt_messages(row: Mapping[str, Any]) -> tuple[dict[str, Any], ...]:
    """The messages to answer, as role and content.

    Raises:
      ValueError: there are none, one has no known form, or none is left to answer.
    """
    listed = next((row[key] for key in ("messages", "conversations") if key in row), None)
    if not isinstance(listed, list):
        raise ValueError(
            f'row: expected "messages" or "conversations", got columns {sorted(row)}; name the column so'
        )
    messages = []
    for message in listed:
        known = message if isinstance(message, dict) else {}
        role = ROLES.get(str(known.get("role", known.get("from"))))
        content = known.get("content", known.get("value"))
        if role is None or not isinstance(content, str):
            raise ValueError(
                f"messages: expected role and content, or from and value, got {json.dumps(message)[:80]}; "
                f"roles are {', '.join(ROLES)}"
            )
        messages.append({"role": role, "content": content})
    if messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("messages: expected a user message at the end, got none; nothing is to be answered")
    return tuple(messages)


def row_id(row: Mapping[str, Any], messages: Sequence[Mapping[str, Any]]) -> str:
    """The row's "id", or a hash of its messages."""
    if "id" in row:
        return str(row["id"])
    return hashlib.sha256(json.dumps(messages, sort_keys=True).encode()).hexdigest()[:16]


def row_seed(id_: str, seed: int | None) -> int:
    """A seed that belongs to a row, wherever it stands in the file."""
    return int.from_bytes(hashlib.sha256(f"{seed or 0} {id_}".encode()).digest()[:4], "big")


def answered_row(job: Job, text: str, finish_reason: str) -> dict[str, Any]:
    """The row to write: other columns as they were, the messages with their answer."""
    kept = {key: value for key, value in job.row.items() if key not in ("id", "messages", "conversations")}
    return {
        "id": job.id,
        **kept,
        "conversations": [*job.messages, {"role": "assistant", "content": text}],
        "finish_reason": finish_reason,
    }


def _ids(engine: Engine, messages: Sequence[Mapping[str, Any]], settings: Settings) -> tuple[int, ...]:
    tokenizer: Tokenizer | None = engine.tokenizer
    assert tokenizer is not None
    ids = tuple(tokenizer.chat(messages))
    if len(ids) + settings.max_tokens > engine.max_context:
        raise ValueError(
            f"messages: expected at most {engine.max_context - settings.max_tokens} tokens beside an answer of "
            f"{settings.max_tokens}, got {len(ids)}; raise max_context or drop the row"
        )
    return ids


def _answers(
    engine: Engine, jobs: Sequence[Job], settings: Settings
) -> Iterator[tuple[Job, str, str, int, int]]:
    """(job, text, finish reason, tokens, prompt tokens reused) of every job, as they finish."""
    sampled = settings.temperature > 0
    per_job = [
        dataclasses.replace(settings, seed=row_seed(job.id, settings.seed) if sampled else None)
        for job in jobs
    ]
    texts, counts = [""] * len(jobs), [0] * len(jobs)
    for piece in engine.stream([list(job.prompt_ids) for job in jobs], per_job):
        texts[piece.index] += piece.text
        counts[piece.index] += len(piece.token_ids)
        if piece.finish_reason is not None:
            index = piece.index
            yield jobs[index], texts[index], piece.finish_reason, counts[index], piece.reused


def _row(line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        row = None
    if not isinstance(row, dict):
        raise ValueError(f"line: expected a JSON object, got {line.strip()[:60]!r}")
    return row


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    with path.open(encoding="utf-8") as file:
        yield from ((number, line) for number, line in enumerate(file, start=1) if line.strip())


def _write(file: Any, row: Mapping[str, Any]) -> None:
    file.write(json.dumps(row, ensure_ascii=False) + "\n")
    file.flush()


def _finished_ids(out: Path) -> set[str]:
    """Ids of the answers in `out`; half a line, where a run was killed, is cut off."""
    if not out.exists():
        return set()
    ids, whole = set(), 0
    with out.open("rb+") as file:
        for line in file:
            if not line.endswith(b"\n"):
                file.truncate(whole)
                os.fsync(file.fileno())
                break
            whole += len(line)
            ids.add(str(json.loads(line)["id"]))
    return ids


def _check_provenance(out: Path, mine: Mapping[str, Any]) -> None:
    path = provenance_file(out)
    if path.exists():
        theirs = json.loads(path.read_text("utf-8"))
        for key, value in mine.items():
            if theirs.get(key) != value:
                raise ValueError(
                    f"out: expected answers made with {key} {value}, got {theirs.get(key)} in {path}; "
                    "name another output, or go on with what began it"
                )
    elif out.exists() and out.stat().st_size:
        raise ValueError(
            f"out: expected a new file or one with {path.name} beside it, got {out}; name another output"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(mine, indent=1) + "\n", "utf-8")
