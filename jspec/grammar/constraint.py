"""A running request's grammar: moved on by the tokens that it emitted, and by nothing else."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int

from jspec.grammar.tree import Matcher, fill_allowed


@runtime_checkable
class Following(Matcher, Protocol):
    """A matcher that says when there is nothing left to match."""

    @property
    def complete(self) -> bool:
        """Whether nothing but an end can follow."""
        ...

    @property
    def problem(self) -> str:
        """Why nothing is allowed here."""
        ...


class Constraint:
    """Follows one request. `taken` counts the tokens that it was moved on by."""

    def __init__(self, matcher: Following):
        """
        Args:
          matcher: at the start of the answer.
        """
        self._matcher = matcher
        self.taken = 0
        self.failure: str | None = None  # why nothing may follow; None = something may

    def advance(self, token_ids: Sequence[int]) -> int | None:
        """Takes in the tokens that a round emitted.

        Returns:
          Index of the one that completes the grammar, behind which nothing belongs to the answer; None = it
          goes on, or cannot and `failure` says why.
        """
        for index, token in enumerate(token_ids):
            self._matcher.accept(token)
            self.taken += 1
            if self._matcher.complete:
                return index
        allowed = self._matcher.allowed()
        if allowed is not None and not allowed.any():
            self.failure = f"the grammar allows nothing here: {self._matcher.problem}"
        return None

    def fill(
        self,
        tokens: Sequence[int],
        parents: Sequence[int] | None,
        allowed: Int[np.ndarray, "nodes words"],
    ) -> list[int]:
        """Writes what may follow the anchor and each draft token.

        Args:
          tokens: draft tokens that are verified, in node order.
          parents: node number of each one's parent; None = a chain.
          allowed: all ones; rows of nodes that the grammar cannot reach, or cannot go on from, stay so.

        Returns:
          Nodes that the grammar cannot go on from.
        """
        return fill_allowed(self._matcher, tokens, parents, allowed)
