"""From data files to folders of samples: one for training, and one for validation if asked for."""

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jspec_train.data.convert import Converter
from jspec_train.data.report import Report
from jspec_train.data.rows import Row, data_files, read_rows
from jspec_train.sample_header import Header
from jspec_train.samples import SampleSource, SampleWriter

TRAIN, VALIDATION = "train", "validation"


def prepare(
    data: str | Path,
    out: str | Path,
    converter: Converter,
    header: Header,
    *,
    validation: float = 0.0,
    shard_samples: int = 8192,
    on_row: Callable[[int, Mapping[str, Report]], None] = lambda number, reports: None,
) -> dict[str, SampleSource]:
    """Converts all rows and writes the samples; an interrupted preparation goes on where it stopped.

    Args:
      data: a file or folder, see `read_rows`.
      out: a folder. With validation, the samples are in `out`/train and `out`/validation.
      converter: makes samples of rows.
      header: from `samples_header`.
      validation: share of the questions, 0 to less than 1, whose rows are kept from training. Rows with the
        same first user message go to the same side, and always to the same, whatever else is in the data.
      shard_samples: samples in a shard: what an interruption can cost.
      on_row: called with the number of rows read and the reports by side.

    Returns:
      The sources by side: "train", and "validation" if there is one.

    Raises:
      FileNotFoundError, ValueError: the data or a row is not as expected, nothing is left, or `out` holds
        something else.
      OSError: the disk is full; what is written so far is kept.
    """
    if not 0 <= validation < 1:
        raise ValueError(f"validation: expected a share from 0 to less than 1, got {validation}")
    data_files(data)  # before a folder is made
    out = Path(out)
    folders = {TRAIN: out / TRAIN, VALIDATION: out / VALIDATION} if validation else {TRAIN: out}
    with contextlib.ExitStack() as stack:
        sides = {
            name: _Side(stack.enter_context(SampleWriter(folder, header, shard_samples=shard_samples)))
            for name, folder in folders.items()
        }
        for number, row in enumerate(read_rows(data)):
            if number >= min(side.rows for side in sides.values()):
                sides[_side_of(converter, row, validation)].take(number, row, converter)
            on_row(number + 1, {name: side.report for name, side in sides.items()})
        _check(sides)
        return {name: side.writer.finish(side.report.state) for name, side in sides.items()}


def samples_header(
    converter: Converter, data: str | Path, *, target: str | None, settings: Mapping[str, Any]
) -> Header:
    """What all samples of a preparation share; a preparation goes on only with an equal one.

    Args:
      converter: of the rows.
      data: the files; their names and sizes count.
      target: identity of the target that wrote the answers, if it did.
      settings: JSON; further settings, such as the share of validation.

    Raises:
      FileNotFoundError, ValueError: as in `data_files`.
    """
    sizes = [(file.name, file.stat().st_size) for file in data_files(data)]
    digest = hashlib.sha256(json.dumps(sizes).encode()).hexdigest()[:16]
    used = dataclasses.asdict(converter.settings)
    chat = converter.chat
    return Header(
        kind="samples",
        tokenizer=chat.tokenizer.identity,
        template=chat.template_hash,
        max_length=used.pop("max_length"),
        target=target,
        settings={
            **used,
            "variables": dict(chat.variables),
            "data": f"{len(sizes)} files, {sum(size for _, size in sizes)} bytes, {digest}",
            **settings,
        },
    )


class _Side:
    """One folder that is being written, and how far it is."""

    def __init__(self, writer: SampleWriter):
        self.writer = writer
        cursor = writer.cursor or {"rows": 0, "parts": 0, "report": {}}
        self.rows: int = cursor["rows"]  # rows of the data that are done, of the other side as well
        self.parts: int = cursor["parts"]  # samples of the next row that are written
        self.report = Report(**cursor["report"])

    def take(self, number: int, row: Row, converter: Converter) -> None:
        """Writes the samples of a row of this side, unless an earlier run did."""
        if number < self.rows:
            return
        samples, outcome = converter.convert(row)
        before, after = self.report, self.report.plus(row.where, outcome)
        skipped, self.rows, self.parts = self.parts, number + 1, 0
        for part, sample in enumerate(samples[skipped:], start=skipped + 1):
            if part == len(samples):
                cursor = {"rows": number + 1, "parts": 0, "report": after.state}
            else:
                cursor = {"rows": number, "parts": part, "report": before.state}
            self.writer.write(sample, cursor)
        if not samples:
            self.writer.mark({"rows": number + 1, "parts": 0, "report": after.state})
        self.report = after


def _side_of(converter: Converter, row: Row, validation: float) -> str:
    if not validation:
        return TRAIN
    digest = hashlib.sha256(converter.question(row).strip().encode("utf-8", "replace")).digest()
    return VALIDATION if int.from_bytes(digest[:8], "big") < validation * 2**64 else TRAIN


def _check(sides: Mapping[str, _Side]) -> None:
    """Before anything is called finished: every side has something."""
    reports = [side.report for side in sides.values()]
    if not any(report.kept for report in reports):
        max(reports, key=lambda report: report.rows).check()
    for name, side in sides.items():
        if not side.report.kept:
            raise ValueError(
                f"validation: expected samples on both sides, got none for {name} of {sum(r.rows for r in reports)} "
                "rows; change the share, or prepare more data"
            )
