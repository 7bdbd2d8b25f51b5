"""A folder that appears whole or not at all."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A folder to write to under another name, which becomes `path` when the block ends.

    If the block raises, nothing stays behind.

    Args:
      path: must not exist, or be an empty folder.

    Raises:
      ValueError: it exists.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"folder: expected a new or empty one, got {path}; choose another or remove it")
    path.parent.mkdir(parents=True, exist_ok=True)
    hidden = path.parent / f".{path.name}.{uuid.uuid4().hex}"
    hidden.mkdir()
    try:
        yield hidden
        os.replace(hidden, path)
    except BaseException:
        shutil.rmtree(hidden, ignore_errors=True)
        raise
