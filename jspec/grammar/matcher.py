"""One grammar followed along one text, by llguidance."""

import llguidance
import numpy as np
from jaxtyping import Int


class LlguidanceMatcher:
    """A `jspec.grammar.tree.Matcher` that knows when its grammar is complete, and that outlives its errors.

    llguidance gives up on a text for good where a state is too complex for its limits. A draft may lead
    there and then be refused, so this class goes back by replaying what is left of the text.
    """

    def __init__(self, start: llguidance.LLMatcher, end_bits: Int[np.ndarray, "words"], *, ends_by_eos: bool):
        """
        Args:
          start: before the first token; it stays there.
          end_bits: of the end-of-sequence ids, as `allowed` has them.
          ends_by_eos: False = these ids are not allowed either, and only a grammar that cannot go on ends.
        """
        self._start, self._matcher = start, start.deep_copy()
        self._end_bits, self._ends_by_eos = end_bits, ends_by_eos
        self._tokens: list[int] = []
        self._allowed: np.ndarray | None = None  # of the place where it is; None = not computed

    def allowed(self) -> Int[np.ndarray, "words"] | None:
        """See `Matcher`."""
        if self._stopped:
            return None
        bits = self._bits()
        going_on = bits & ~self._end_bits
        if not going_on.any():
            return None if self._accepting else going_on
        return bits if self._ends_by_eos else going_on

    def accept(self, token: int) -> None:
        """See `Matcher`; a token that is not allowed leaves nothing allowed, and `problem` says so."""
        self._tokens.append(token)
        self._allowed = None
        self._matcher.consume_token(token)

    def rollback(self, count: int) -> None:
        """See `Matcher`."""
        self._allowed = None
        del self._tokens[len(self._tokens) - count :]
        if self._matcher.is_error() or not self._matcher.rollback(count):
            self._matcher = self._start.deep_copy()
            self._matcher.consume_tokens(self._tokens)

    @property
    def complete(self) -> bool:
        """Whether nothing but an end can follow."""
        return self._stopped or (self._accepting and self.allowed() is None)

    @property
    def problem(self) -> str:
        """Why nothing is allowed here."""
        said = self._matcher.get_error().partition("\n")[0]
        return said or "no token of the model goes on from here"

    @property
    def _stopped(self) -> bool:
        return self._matcher.is_stopped() and not self._matcher.is_error()

    @property
    def _accepting(self) -> bool:
        return self._matcher.is_accepting() and not self._matcher.is_error()

    def _bits(self) -> Int[np.ndarray, "words"]:
        if self._allowed is None:
            bits = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[: len(self._end_bits)]
            # In an error llguidance says that the text may end.
            self._allowed = np.zeros_like(bits) if self._matcher.is_error() else bits
        return self._allowed
