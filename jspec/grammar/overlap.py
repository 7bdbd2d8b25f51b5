"""When the host does a grammar's work."""

from typing import Literal, get_args

# "none": the masks are filled before the target is launched, which waits for the host.
# "two": they are filled while the target runs. A round has two synchronisations: the host waits for the draft
#   tokens, and for the report.
GrammarOverlap = Literal["none", "two"]
MODES: tuple[GrammarOverlap, ...] = get_args(GrammarOverlap)


def check_overlap(value: str) -> None:
    """Raises ValueError for a word that is none of these."""
    if value not in MODES:
        raise ValueError(
            f"grammar_overlap: expected one of {', '.join(MODES)}, got {value!r}; pick one of these"
        )
