"""Allowed tokens of every node of a draft, from a grammar's matcher, on the host while `execute` runs."""

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int


@runtime_checkable
class Matcher(Protocol):
    """A grammar that follows one text, token by token."""

    def allowed(self) -> Int[np.ndarray, "words"] | None:
        """Bit id % 32 of word id // 32 is set where the id may come next.

        None once the grammar is complete; no bit is set where it is not and no token goes on.
        """
        ...

    def accept(self, token: int) -> None:
        """Takes in a token that is allowed."""
        ...

    def rollback(self, count: int) -> None:
        """Forgets the last `count` tokens."""
        ...


def fill_allowed(
    matcher: Matcher,
    tokens: Sequence[int],
    parents: Sequence[int] | None,
    rows: Int[np.ndarray, "nodes words"],
) -> list[int]:
    """Writes what may follow each node, walking the tree depth first.

    Only nodes that the grammar can reach and go on from are written. Others keep what `rows` holds: the token
    that leads there ends the request, or is masked at its parent and can never be accepted. They are no rows
    of zeros: every verifier may look at them, and wants distributions.

    Args:
      matcher: after the anchor; on return it is there again, also after an exception.
      tokens: draft tokens that are verified, in node order.
      parents: node number of each one's parent; None = a chain.
      rows: one for the anchor, then one per draft token; the caller fills it with ones before.

    Returns:
      Nodes that the grammar reaches and cannot go on from: it is complete there, or allows nothing.

    Raises:
      ValueError: fewer rows than nodes, or a parent that does not come before its child.
    """
    if len(rows) < len(tokens) + 1:
        raise ValueError(
            f"rows: expected at least {len(tokens) + 1} (the anchor and {len(tokens)} draft tokens), "
            f"got {len(rows)}; pass those of the lane's nodes"
        )
    children: list[list[int]] = [[] for _ in range(len(tokens) + 1)]
    for draft, parent in enumerate(range(len(tokens)) if parents is None else parents[: len(tokens)]):
        if not 0 <= parent <= draft:
            raise ValueError(
                f"parents[{draft}]: expected a node from 0 to {draft}, got {parent}; "
                "parents come before children"
            )
        children[parent].append(draft + 1)

    ends = []

    def visit(node: int) -> None:
        allowed = matcher.allowed()
        if allowed is None or not allowed.any():
            ends.append(node)
            return
        rows[node] = allowed
        for child in children[node]:
            token = int(tokens[child - 1])
            if token < 0 or not allowed[token // 32] >> (token % 32) & 1:
                continue
            matcher.accept(token)
            try:
                visit(child)
            finally:
                matcher.rollback(1)

    visit(0)
    return ends
