"""A grammar that holds from some text on, such as the end of a model's reasoning."""

from collections.abc import Callable

import numpy as np
from jaxtyping import Int

from jspec.grammar.matcher import LlguidanceMatcher


class AfterMarker:
    """Allows everything until the text ends with a marker, and then follows a matcher.

    The grammar starts with the token behind the one that completes the marker, wherever in a block that is.
    A text that ends before the marker has no form.
    """

    def __init__(
        self, marker: bytes, token_bytes: Callable[[int], bytes], inner: LlguidanceMatcher, words: int
    ):
        """
        Args:
          marker: at least one byte.
          token_bytes: what an id spells, special tokens included.
          inner: at its start.
          words: of a row of bits.
        """
        self._marker, self._token_bytes, self._inner = marker, token_bytes, inner
        self._everything = np.full((words,), -1, np.int32)
        self._ends = [b""]  # of the text, before each token that came before the grammar
        self._begun = 0  # tokens of the grammar
        self._found = False

    def allowed(self) -> Int[np.ndarray, "words"] | None:
        """See `Matcher`."""
        return self._inner.allowed() if self._found else self._everything

    def accept(self, token: int) -> None:
        """See `Matcher`."""
        if self._found:
            self._inner.accept(token)
            self._begun += 1
            return
        text = self._ends[-1] + self._token_bytes(token)
        self._found = self._marker in text
        self._ends.append(text[max(0, len(text) - len(self._marker) + 1) :])

    def rollback(self, count: int) -> None:
        """See `Matcher`."""
        inside = min(count, self._begun)
        if inside:
            self._inner.rollback(inside)
            self._begun -= inside
        if count > inside:
            del self._ends[inside - count :]
            self._found = False

    @property
    def complete(self) -> bool:
        """Whether nothing but an end can follow."""
        return self._found and self._inner.complete

    @property
    def problem(self) -> str:
        """Why nothing is allowed here."""
        return self._inner.problem
