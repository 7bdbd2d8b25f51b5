"""The values that pass between the programs of a round.

Numbering used everywhere: a lane's nodes are 0 (the anchor), 1, 2, ...; draft token j (0-based)
is node j + 1. Padding lanes and padding nodes may hold anything; nobody may read them.

A proposal is a chain, where draft token j hangs on node j, or a tree. In a tree every node comes after
its parent, so the first n draft tokens are a tree for any n: a verify length means the same for both.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from pallas_kernels.pytree import pytree, static


@pytree
class Nodes:
    """What the target executes in one round, all lanes packed one after the other.

    Lane l owns nodes offsets[l] .. offsets[l + 1] - 1. Its first certain_lengths[l] nodes are
    tokens that are already part of the text (a prompt chunk, or just the anchor); the rest are
    draft tokens. Logits are needed from the last certain node on.
    """

    tokens: Int[Array, "nodes"]
    positions: Int[Array, "nodes"]  # 0-based positions in the text; equal to the committed length + depth
    offsets: Int[Array, "bounds"]  # lanes + 1 of them
    certain_lengths: Int[Array, "lanes"]
    # Index of the parent within the lane, -1 at the lane's first node. None = every lane is a chain.
    parents: Int[Array, "nodes"] | None = None


@pytree
class OneHot:
    """q of any deterministic choice: all mass on the draft token."""


@pytree
class Dense:
    """q over the whole vocabulary, or over the ids of a reduced draft vocabulary."""

    probs: Float[Array, "lanes drafts vocabulary"]
    ids: Int[Array, "vocabulary"] | None  # target id of each column; None = the columns are target ids


@pytree
class Sparse:
    """q over a few candidates per draft token; ids are distinct within a row."""

    ids: Int[Array, "lanes drafts candidates"]
    probs: Float[Array, "lanes drafts candidates"]


@pytree
class Proposal:
    """Draft tokens with the distribution that they were drawn from.

    Whoever draws returns the row it drew from; nobody recomputes it. Entries at or past
    lengths[l] are placeholders: they can never be accepted.

    A tree has parents and a tree_depth, and a q that is one-hot: which tokens hang on a node must not
    depend on a draw.
    """

    tokens: Int[Array, "lanes drafts"]
    lengths: Int[Array, "lanes"]
    q: OneHot | Dense | Sparse
    confidence: Float[Array, "lanes drafts"] | None = None  # P(accepted given its prefix was)
    # Node number of each draft token's parent, at most the draft token's own index. None = a chain.
    parents: Int[Array, "lanes drafts"] | None = None
    tree_depth: int = static(default=0)  # of a tree: no path has more draft tokens

    @property
    def depth(self) -> int:
        """Most draft tokens that can be accepted."""
        return self.tokens.shape[1] if self.parents is None else self.tree_depth


@pytree
class Verdict:
    """What the target made of a proposal, before any stop is looked at."""

    path: Int[Array, "lanes path"]  # node that becomes the lane's i-th new token, anchor first; -1 = none
    accept_length: Int[Array, "lanes"]  # draft tokens accepted, bonus not counted
    bonus: Int[Array, "lanes"]  # the token emitted after the last accepted one


def chain_path(accept_length: Int[Array, "lanes"], nodes: int) -> Int[Array, "lanes path"]:
    """The path of a chain that accepted `accept_length` draft tokens: 0 .. accept_length, then -1."""
    index = jax.lax.broadcasted_iota(jnp.int32, (accept_length.shape[0], nodes), 1)
    return jnp.where(index <= accept_length[:, None], index, -1)
