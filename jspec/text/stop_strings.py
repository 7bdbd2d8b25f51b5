"""Stop strings in a stream of text."""

from collections.abc import Sequence


class StopStrings:
    """Finds the first stop string in a text that arrives in pieces, wherever the pieces are cut.

    The stop string that is complete first wins; of several complete at the same character, the longest.
    So the answer never waits for text that has not come, and does not depend on the pieces. Text that may
    be the start of a stop string is held back. Characters are compared by code point, not normalised.
    """

    def __init__(self, stops: Sequence[str], *, include: bool = False):
        """Starts at the beginning of a text.

        Args:
          stops: the stop strings; none is allowed too.
          include: whether the text that comes out ends with the stop string or before it.

        Raises:
          ValueError: a stop string is empty, or a lone string stands in place of the list.
        """
        if isinstance(stops, str):
            raise ValueError(
                f"stops: expected a list of strings, got the string {stops!r}; write [{stops!r}]"
            )
        if any(not stop for stop in stops):
            raise ValueError(f"stops: expected non-empty strings, got {list(stops)!r}; remove the empty one")
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    @property
    def held(self) -> str:
        """Text that may be the start of a stop string."""
        return self._held

    def push(self, piece: str) -> tuple[str, str | None]:
        """Takes the next piece; returns the text that is final and the stop string found, None so far.

        Once one is found the text is over: what follows it in the piece is dropped.
        """
        text = self._held + piece
        ends = [(start + len(stop), stop) for stop in self._stops if (start := text.find(stop)) >= 0]
        if not ends:
            held_length = max((_started_length(text, stop) for stop in self._stops), default=0)
            final_length = len(text) - held_length
            self._held = text[final_length:]
            return text[:final_length], None
        end, stop = min(ends, key=lambda found: (found[0], -len(found[1])))
        self._held = ""
        return text[: end if self._include else end - len(stop)], stop

    def flush(self) -> str:
        """Ends the text: what was held back is no stop string after all."""
        held, self._held = self._held, ""
        return held


def _started_length(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`, `stop` itself excluded."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
