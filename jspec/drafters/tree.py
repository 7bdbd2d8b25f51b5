"""Grows draft trees depth by depth, all lanes at once, inside the one propose program.

The drafter gives candidates for the nodes that are expanded (a frontier); this module decides which
candidates are expanded next, and in the end which of them are kept as draft tokens. Draft tokens are in
the order of generation: by depth, then by the place of their parent in its frontier, then by rank. So
parents come before children, and the first n draft tokens are a tree for any n.
"""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.drafters.tree_shape import DynamicTree, TreeShape
from jspec.round import OneHot, Proposal
from pallas_kernels.attention.sight import Sight, first_in_window
from pallas_kernels.pytree import pytree, static


@pytree
class Ranked:
    """The best candidates after each of some nodes, best first."""

    ids: Int[Array, "lanes rows candidates"]  # target ids
    probs: Float[Array, "lanes rows candidates"]  # the drafter's; NaN counts as 0


@pytree
class Frontier:
    """The nodes of one depth that a drafter is asked to expand.

    A round's rows are numbered over all its frontiers, in the order of the calls: those of this one are
    starts[-1], starts[-1] + 1, ...
    """

    tokens: Int[Array, "lanes rows"]  # target ids
    sources: Int[
        Array, "lanes rows"
    ]  # place of each one's parent in the frontier before; 0 = the anchor first
    visible: Int[Array, "lanes rows words"]  # bit r % 32 of word r // 32: row r is an ancestor or itself
    starts: tuple[int, ...] = static()  # number of the first row of every frontier so far

    @property
    def depth(self) -> int:
        """Of its tokens: 1 just below the anchor."""
        return len(self.starts)


State = TypeVar("State")
Extend = Callable[[State, Frontier], tuple[State, Ranked]]


def grow(shape: TreeShape, first: Ranked, extend: Extend[State], state: State) -> tuple[Proposal, State]:
    """Drafts a tree for every lane.

    A candidate's score is the sum of the log-probabilities on its path, in float32: products, as the public
    implementations use, are 0 from depth 10 on where probabilities are 1e-4. No term is above 0, and rounding is
    monotone, so no candidate scores above its parent; of equal scores the one generated first wins: if a
    candidate is kept, so is its parent.

    Args:
      shape: static.
      first: candidates after the anchor: one row per lane.
      extend: expands a frontier: (state, frontier) to (state, candidates), as many rows as the frontier
        has. Called under the trace, once for each depth from 1 to shape.draft_depth - 1.
      state: what the first call is given, for instance the keys and values of the rows so far.

    Returns:
      A proposal of the shape's whole draft_length, without parents if it is a chain, whose confidence is
      each draft token's probability; and the last state.

    Raises:
      ValueError: fewer candidates than the shape's width, or another number of rows than was asked for.

    Source: EAGLE-2 (arXiv 2406.16858), section 4; frontier order and ties as in SGLang 0.5.23,
      speculative/spec_utils.py, with the lowest index first.
    """
    ranked = _checked(shape, first, 1)
    lanes, width = first.ids.shape[0], shape.width
    probs = [
        ranked.probs.reshape(lanes, -1)
    ]  # per depth, of all candidates of that depth given their parents
    scores = [jnp.log(probs[0])]  # the same for the whole path
    tokens = [ranked.ids.reshape(lanes, -1)]
    parents = [jnp.full_like(tokens[0], -1)]  # among the candidates of all depths; -1 = the anchor
    frontier: Frontier | None = None
    for depth in range(1, shape.draft_depth):
        picked = _pick(shape, depth, scores[-1])
        frontier = _frontier(shape, jnp.take_along_axis(tokens[-1], picked, axis=1), picked, frontier)
        state, ranked = extend(state, frontier)
        ranked = _checked(shape, ranked, picked.shape[1])
        score = jnp.take_along_axis(scores[-1], picked, axis=1)[:, :, None] + jnp.log(ranked.probs)
        before = sum(layer.shape[1] for layer in tokens[:-1])
        scores.append(score.reshape(lanes, -1))
        probs.append(ranked.probs.reshape(lanes, -1))
        tokens.append(ranked.ids.reshape(lanes, -1))
        parents.append(jnp.repeat(before + picked, width, axis=1))
    kept = _keep(shape, jnp.concatenate(scores, axis=1))
    proposal = Proposal(
        tokens=jnp.take_along_axis(jnp.concatenate(tokens, axis=1), kept, axis=1),
        lengths=jnp.full((lanes,), shape.draft_length, jnp.int32),
        q=OneHot(),
        confidence=jnp.take_along_axis(jnp.concatenate(probs, axis=1), kept, axis=1),
        parents=None if shape.is_chain else _parent_nodes(kept, jnp.concatenate(parents, axis=1)),
        tree_depth=0 if shape.is_chain else shape.draft_depth,
    )
    return proposal, state


def _checked(shape: TreeShape, ranked: Ranked, rows: int) -> Ranked:
    _, got, candidates = ranked.ids.shape
    if got != rows:
        raise ValueError(f"candidates: expected {rows} rows, one for each that was asked for, got {got}")
    if candidates < shape.width:
        raise ValueError(
            f"candidates: expected at least {shape.width} of each row (the tree's width), got {candidates}; "
            "draft a narrower tree"
        )
    probs = ranked.probs[:, :, : shape.width].astype(jnp.float32)
    return Ranked(ids=ranked.ids[:, :, : shape.width], probs=jnp.where(probs > 0, jnp.minimum(probs, 1), 0))


def _pick(shape: TreeShape, depth: int, scores: Float[Array, "lanes candidates"]) -> Int[Array, "lanes rows"]:
    """Which candidates of `depth` are expanded, best first (a static shape: in its order)."""
    lanes, candidates = scores.shape
    if isinstance(shape, DynamicTree):
        rows = shape.frontier_length(depth)
        if rows < candidates:
            return jax.lax.top_k(scores, rows)[1].astype(jnp.int32)
        places = np.arange(candidates)
    else:
        places = shape.places(shape.frontier(depth))
    return jnp.broadcast_to(jnp.asarray(places, jnp.int32), (lanes, len(places)))


def _keep(shape: TreeShape, scores: Float[Array, "lanes candidates"]) -> Int[Array, "lanes drafts"]:
    """Which candidates of all depths become draft tokens, in the order of generation."""
    lanes = scores.shape[0]
    if isinstance(shape, DynamicTree):
        return jnp.sort(jax.lax.top_k(scores, shape.draft_length)[1], axis=1).astype(jnp.int32)
    kept, before = [], 0
    for depth in range(1, shape.depth + 1):
        kept += [before + place for place in shape.places(shape.of_depth(depth))]
        before += shape.width * len(shape.frontier(depth - 1))
    return jnp.broadcast_to(jnp.asarray(kept, jnp.int32), (lanes, len(kept)))


def _parent_nodes(
    kept: Int[Array, "lanes drafts"], parents: Int[Array, "lanes candidates"]
) -> Int[Array, "lanes drafts"]:
    """Node number of each draft token's parent: one more than the draft tokens before it, 0 the anchor."""
    parent = jnp.take_along_axis(parents, kept, axis=1)
    before = jnp.sum(kept[:, None, :] < parent[:, :, None], axis=2, dtype=jnp.int32)
    return jnp.where(parent < 0, 0, before + 1)


def _frontier(
    shape: TreeShape,
    tokens: Int[Array, "lanes rows"],
    picked: Int[Array, "lanes rows"],
    before: Frontier | None,
) -> Frontier:
    lanes, rows = tokens.shape
    sources = picked // shape.width
    starts = (0,) if before is None else (*before.starts, before.starts[-1] + before.tokens.shape[1])
    words = -(-(starts[-1] + rows) // 32)
    number = starts[-1] + np.arange(rows)
    own = np.zeros((rows, words), np.uint32)
    own[np.arange(rows), number // 32] = np.uint32(1) << (number % 32).astype(np.uint32)
    visible = jnp.broadcast_to(jnp.asarray(own.view(np.int32)), (lanes, rows, words))
    if before is not None:
        above = jnp.take_along_axis(before.visible, sources[:, :, None], axis=1)
        visible = visible | jnp.pad(above, ((0, 0), (0, 0), (0, words - above.shape[2])))
    return Frontier(tokens=tokens, sources=sources, visible=visible, starts=starts)


def frontier_sight(
    frontier: Frontier,
    page_table: Int[Array, "lanes columns"],
    context_lengths: Int[Array, "lanes"],
    *,
    window: int | None = None,
) -> Sight:
    """What a frontier's rows see: the context, the rows that are their ancestors, themselves.

    Queries are this frontier's rows, in-flight keys those of all frontiers so far; each lane's lie
    together, lane after lane.

    Args:
      frontier: of `grow`.
      page_table: pages of each lane, in the order of the positions.
      context_lengths: rows of each lane in the drafter's own cache; a row of depth d is at position
        context_lengths + d - 1.
      window: a row sees itself and window - 1 positions before it; None = all.
    """
    lanes, rows = frontier.tokens.shape
    keys = frontier.starts[-1] + rows
    visible = frontier.visible
    hidden = 0 if window is None or frontier.depth <= window else frontier.starts[frontier.depth - window]
    if hidden:
        seen = np.packbits(np.arange(32 * visible.shape[2]) >= hidden, bitorder="little").view("<i4")
        visible = visible & jnp.asarray(seen)[None, None, :]
    positions = context_lengths + (frontier.depth - 1)
    return Sight(
        query_offsets=rows * jnp.arange(lanes + 1, dtype=jnp.int32),
        key_offsets=keys * jnp.arange(lanes + 1, dtype=jnp.int32),
        page_table=page_table,
        context_lengths=context_lengths,
        first_visible=jnp.repeat(first_in_window(positions, window), rows),
        causal=jnp.zeros((lanes,), bool),
        visible=visible.reshape(lanes * rows, -1),
        max_queries=rows,
        max_keys=keys,
    )
