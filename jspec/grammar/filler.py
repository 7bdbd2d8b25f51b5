"""A round's masks, filled on the host while the device executes it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decode import Round
from jspec.grammar.constraint import Constraint
from jspec.grammar.masks import Masks


class MaskFiller:
    """Fills the masks of an engine's rounds; those of rounds without a grammar it keeps."""

    def __init__(self, vocab_size: int):
        """
        Args:
          vocab_size: of the target.
        """
        self._vocab_size, self._words = vocab_size, -(-vocab_size // 32)
        self._nothing: dict[int, Masks] = {}

    def ask(self, round_: Round) -> None:
        """Lets the device send what `fill` will wait for."""
        for array in jax.tree.leaves(_looked_at(round_)):
            array.copy_to_host_async()

    def fill(self, constraints: Sequence[Constraint | None], round_: Round, num_rows: int) -> Masks:
        """Walks each lane's grammar over its nodes. Waits for the draft tokens, but not for `execute`.

        Args:
          constraints: of each lane that is no padding; None = it has none, or emits nothing in this round.
            Each has taken in all that its request emitted.
          round_: from propose.
          num_rows: rows of logits; a lane's come after each other, one for its anchor and one per verified
            token.
        """
        if all(constraint is None for constraint in constraints):
            return self._all_allowed(num_rows)
        tokens, parents, verified = jax.device_get(_looked_at(round_))
        allowed = np.full((num_rows, self._words), -1, np.int32)
        ends = np.zeros((num_rows,), bool)
        start = 0
        for lane, constraint in enumerate(constraints):
            count = int(verified[lane])
            if constraint is not None:
                nodes = constraint.fill(
                    tokens[lane, :count].tolist(),
                    None if parents is None else parents[lane, :count].tolist(),
                    allowed[start : start + count + 1],
                )
                ends[[start + node for node in nodes]] = True
            start += count + 1
        return Masks(allowed=allowed, ends=ends)

    def _all_allowed(self, num_rows: int) -> Masks:
        """Kept on the device: most rounds have no grammar."""
        if num_rows not in self._nothing:
            self._nothing[num_rows] = Masks(
                allowed=jnp.full((num_rows, self._words), -1, jnp.int32),
                ends=jnp.zeros((num_rows,), bool),
            )
        return self._nothing[num_rows]


def _looked_at(round_: Round) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    return round_.proposal.tokens, round_.proposal.parents, round_.verify_lengths
