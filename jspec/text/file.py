"""Text files that a user names."""

from pathlib import Path


def read_text(option: str, path: str | Path, *, expected: str) -> str:
    """The text of a UTF-8 file.

    Args:
      option: by which it was named, for the error.
      path: of the file.
      expected: what it ought to hold, for the error.

    Raises:
      ValueError: it cannot be read, or holds something else than text.
    """
    try:
        return Path(path).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        reason = problem.strerror if isinstance(problem, OSError) else "it is not UTF-8 text"
        raise ValueError(
            f"{option}: expected {expected}, got {str(path)!r} ({reason}); check the path"
        ) from problem
