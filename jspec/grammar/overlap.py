"""When the host does a grammar's work."""

from typing import Literal, get_args

# "none": the masks are filled before the target is launched, which waits for the host.
# "two": they are filled while the target runs. A round has two synchronisations: the host waits for the draft
#   tokens, and for the report.
GrammarOverlap = Literal["none", "two"]


def check_overlap(value: str) -> None:
    """Raises ValueError for a word that is none of these."""
    words = get_args(GrammarOverlap)
    if value not in words:
        raise ValueError(
            f"grammar_overlap: expected one of {', '.join(words)}, got {value!r}; pick one of these"
        )
