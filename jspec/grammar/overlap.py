"""When the host does a grammar's work, which is: move it on by what was emitted, and fill the masks."""

from typing import Literal, get_args

# "none": before the target is launched, which waits for the host.
# "two": the masks are filled while the target runs. A round has two synchronisations: its launch waits for
#   the report of the round before it, its masks wait for the draft tokens.
# "one": everything while the target runs, which is launched before the report of the round before it was
#   read. Report and draft tokens are waited for together. Needs sessions with overlap.
GrammarOverlap = Literal["none", "two", "one"]
MODES: tuple[GrammarOverlap, ...] = get_args(GrammarOverlap)


def resolve_overlap(
    asked: GrammarOverlap | None, usual: GrammarOverlap | None, *, overlap: bool
) -> GrammarOverlap:
    """The mode of a session.

    Args:
      asked: of this session; None = the usual one.
      usual: of the engine, unless the session cannot have it; None = as much overlap as there is.
      overlap: whether the session launches rounds before it has read the ones before them.

    Raises:
      ValueError: the mode that was asked for is none, or needs overlap.
    """
    for kind in (asked, usual):
        if kind is not None and kind not in MODES:
            raise ValueError(
                f"grammar_overlap: expected one of {', '.join(MODES)}, got {kind!r}; pick one of these"
            )
    if asked == "one" and not overlap:
        raise ValueError(
            'grammar_overlap: expected "none" or "two" without overlap, got "one"; pass overlap=True'
        )
    kind = asked or usual or "one"
    return "two" if kind == "one" and not overlap else kind
