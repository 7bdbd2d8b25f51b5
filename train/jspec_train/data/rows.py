"""Rows of JSON Lines, JSON or Parquet files, one at a time."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

KINDS = (".jsonl", ".json", ".parquet")
_CHUNK = 1 << 20  # characters of a JSON array that are read at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """One row as it stands in its file."""

    where: str  # "chats.jsonl:12"; a message about the row begins with it
    values: Mapping[str, Any]  # by column


def data_files(path: str | Path) -> tuple[Path, ...]:
    """The files behind a path: itself, or what a folder holds, in the order of their names.

    Raises:
      FileNotFoundError: there is no such path, or the folder holds no data.
      ValueError: the file is of another kind.
    """
    path = Path(path)
    if path.is_dir():
        files = tuple(sorted(file for file in path.rglob("*") if file.suffix in KINDS and file.is_file()))
        if not files:
            raise FileNotFoundError(
                f"data: expected {', '.join(KINDS)} files in {path}, got none; check the path"
            )
        return files
    if not path.is_file():
        raise FileNotFoundError(f"data: expected a file or folder, got {path}, which does not exist")
    if path.suffix not in KINDS:
        raise ValueError(f"data: expected one of {', '.join(KINDS)}, got {path.name}; convert it first")
    return (path,)


def read_rows(path: str | Path) -> Iterator[Row]:
    """Rows of a file, or of all files of a folder; no more than a batch of them is held in memory.

    Args:
      path: JSON Lines (.jsonl), a JSON array (.json) or Parquet (.parquet), or a folder of such files.

    Raises:
      FileNotFoundError, ValueError: as in `data_files`; or a row cannot be read, naming file and line.
    """
    root = Path(path)
    for file in data_files(root):
        name = file.name if file == root else str(file.relative_to(root))
        yield from _READERS[file.suffix](file, name)


def count_rows(path: str | Path) -> int | None:
    """How many rows there are, where that can be told without parsing them; None otherwise.

    Raises:
      FileNotFoundError, ValueError: as in `data_files`.
    """
    total = 0
    for file in data_files(path):
        if file.suffix == ".json":
            return None
        if file.suffix == ".parquet":
            import pyarrow.parquet

            total += pyarrow.parquet.read_metadata(file).num_rows
        else:
            with file.open("rb") as lines:
                total += sum(1 for line in lines if line.strip())
    return total


def _json_lines(path: Path, name: str) -> Iterator[Row]:
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if line.strip():
                where = f"{name}:{number}"
                yield _row(where, _parsed(where, line))


def _json(path: Path, name: str) -> Iterator[Row]:
    """A JSON array of objects; a .json file that holds JSON Lines is read as such."""
    with path.open(encoding="utf-8") as file:
        buffer = file.read(_CHUNK).lstrip("\ufeff \t\r\n")
        if not buffer.startswith("["):
            yield from _json_lines(path, name)
            return
        decoder, buffer, number = json.JSONDecoder(), buffer[1:], 0
        while True:
            buffer = buffer.lstrip(" \t\r\n,")
            if buffer.startswith("]"):
                return
            where = f"{name}[{number}]"
            try:
                value, end = decoder.raw_decode(buffer)
            except json.JSONDecodeError as problem:
                more = file.read(max(_CHUNK, len(buffer)))  # twice as much each time: no row is parsed often
                if not more:
                    raise ValueError(
                        f"{where}: expected JSON, got {buffer[:60]!r} ({problem.msg})"
                    ) from problem
                buffer += more
                continue
            buffer = buffer[end:]
            yield _row(where, value)
            number += 1


def _parquet(path: Path, name: str) -> Iterator[Row]:
    import pyarrow
    import pyarrow.parquet

    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            number = 0
            for batch in file.iter_batches(batch_size=256):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(where=f"{name}:{number}", values=_without_nulls(values))
    except pyarrow.ArrowInvalid as problem:
        raise ValueError(
            f"{name}: expected a Parquet file, got one that cannot be read ({problem})"
        ) from problem


_READERS = {".jsonl": _json_lines, ".json": _json, ".parquet": _parquet}


def _parsed(where: str, line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError as problem:  # UnicodeDecodeError is one, too
        raise ValueError(f"{where}: expected a JSON object, got {line[:60]!r} ({problem})") from problem


def _row(where: str, value: Any) -> Row:
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object with named columns, got {str(value)[:60]!r}")
    return Row(where=where, values=value)


def _without_nulls(value: Any) -> Any:
    """Parquet gives every message all fields that any message has; an absent one is null."""
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list):
        return [_without_nulls(item) for item in value]
    return value
