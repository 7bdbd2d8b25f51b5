"""Prompts for regeneration: the conversations of any data file, cleaned, as JSON Lines."""

import json
import os
from pathlib import Path

from jspec_train.data.convert import Converter
from jspec_train.data.rows import read_rows


def write_prompts(data: str | Path, out: str | Path, converter: Converter) -> int:
    """Writes a row with id, messages and task for every conversation that holds a question.

    Args:
      data: a file or folder, see `read_rows`.
      out: JSON Lines; replaced as a whole.
      converter: cleans the conversations.

    Returns:
      The number of rows left out, because they have no question.

    Raises:
      ValueError: a row is no conversation; or as in `read_rows`.
    """
    out = Path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    part, left_out = out.with_name(f"{out.name}.part"), 0
    with part.open("w", encoding="utf-8") as file:
        for row in read_rows(data):
            messages = converter.conversation(row).messages
            if not messages:
                left_out += 1
                continue
            task = str(row.values.get("task", converter.settings.task))
            values = {"id": str(row.values.get("id", row.where)), "messages": messages, "task": task}
            file.write(json.dumps(values, ensure_ascii=False) + "\n")
    os.replace(part, out)
    return left_out
