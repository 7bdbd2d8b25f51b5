"""Drafters of trees that are right along one path, or that follow a table of their own."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec.drafters.tree import Ranked, grow
from jspec.drafters.tree_shape import DynamicTree, StaticTree
from jspec.round import OneHot, Proposal
from jspec.slots import rows_of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Branches:
    """A static tree whose path to one leaf is right for `right` tokens; which leaf, the text's length says.

    Siblings on the way are wrong. What hangs on wrong tokens would be right at that depth, so whoever
    loses a parent accepts too much. right >= depth is ORACLE, right = 0 is ANTI.

    Parameters: (table, right, draft tokens to propose): of one engine they can be exchanged.
    """

    shape: StaticTree
    name: str = "branches"
    features: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def draft_length(self):
        return self.shape.draft_length

    @property
    def draft_depth(self):
        return self.shape.depth

    def init(self, params, target, max_slots):
        return ()

    def right_tokens(self, params, text, rows):
        """What the target would emit next, [lanes, depth]. Here: a table's greedy line."""
        token, tokens = text.tokens[rows, text.lengths[rows] - 1], []
        for _ in range(self.shape.depth):
            token = jnp.argmax(params[0][token], axis=1).astype(jnp.int32)
            tokens.append(token)
        return jnp.stack(tokens, axis=1)

    def vocabulary(self, params):
        return params[0].shape[0]

    def draft(self, params, target, state, lanes, text, sampling):
        rows, paths, leaves = rows_of(lanes), self.shape.paths, leaves_of(self.shape)
        cuts = range(self.shape.depth + 1)
        offsets = [[[_offset(path, leaf, cut) for path in paths] for leaf in leaves] for cut in cuts]
        parents = np.asarray([paths.index(path[:-1]) + 1 if len(path) > 1 else 0 for path in paths], np.int32)
        depths = np.asarray([len(path) for path in paths])
        tokens = self.right_tokens(params, text, rows)[:, depths - 1]
        tokens = tokens + jnp.asarray(offsets, jnp.int32)[params[-2]][text.lengths[rows] % len(leaves)]
        return Proposal(
            tokens=tokens % self.vocabulary(params),
            lengths=jnp.broadcast_to(params[-1], lanes.shape),
            q=OneHot(),
            parents=jnp.broadcast_to(jnp.asarray(parents), tokens.shape),
            tree_depth=self.shape.depth,
        )

    def absorb(self, params, target, state, lanes, text, committed):
        return state, jnp.broadcast_to(params[-1], lanes.shape)


def leaves_of(shape: StaticTree) -> list[tuple[int, ...]]:
    """Paths that end where nothing hangs (first children come first, so a node without one has none)."""
    return [path for path in shape.paths if (*path, 0) not in shape.paths]


def _offset(path: tuple[int, ...], leaf: tuple[int, ...], right: int) -> int:
    """How far from the right token a path's last one is."""

    def is_right(path):
        return path == leaf[: len(path)] and len(path) <= right

    return 0 if is_right(path) or not is_right(path[:-1]) else 1 + path[-1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scripted(Branches):
    """Right by a list of known texts, found by their first token.

    Parameters: (texts, vocabulary size, right, draft tokens to propose).
    """

    def right_tokens(self, params, text, rows):
        mine = jnp.argmax(params[0][None, :, 0] == text.tokens[rows, 0][:, None], axis=1)
        index = text.lengths[rows][:, None] + jnp.arange(self.shape.depth)[None, :]
        return params[0][mine[:, None], jnp.minimum(index, params[0].shape[1] - 1)]

    def vocabulary(self, params):
        return params[1]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Confident:
    """A tree of either kind, grown from the probabilities of a table of its own. Parameters: (logits,)."""

    shape: DynamicTree | StaticTree
    name: str = "confident"
    features: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def draft_length(self):
        return self.shape.draft_length

    @property
    def draft_depth(self):
        return self.shape.draft_depth

    def init(self, params, target, max_slots):
        return ()

    def draft(self, params, target, state, lanes, text, sampling):
        def after(tokens):
            probs, ids = jax.lax.top_k(jax.nn.softmax(params[0], axis=1)[tokens], self.shape.width)
            return Ranked(ids=ids.astype(jnp.int32), probs=probs)

        rows = rows_of(lanes)
        anchors = text.tokens[rows, text.lengths[rows] - 1]
        first = after(anchors[:, None])
        return grow(self.shape, first, lambda calls, frontier: (calls + 1, after(frontier.tokens)), 0)[0]

    def absorb(self, params, target, state, lanes, text, committed):
        return state, jnp.full(lanes.shape, self.draft_length, jnp.int32)
