"""How lanes share a round's arrays: how much each verifies, where its nodes and rows lie."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.ancestry import depths, leading
from jspec.buckets import Bucket
from jspec.drafters.protocol import Text
from jspec.round import Nodes, OneHot, Proposal
from jspec.slots import Slots, rows_of


def no_proposal(lanes: int) -> Proposal:
    """The proposal of a round without drafting."""
    return Proposal(
        tokens=jnp.zeros((lanes, 0), jnp.int32),
        lengths=jnp.zeros((lanes,), jnp.int32),
        q=OneHot(),
    )


def limit(proposal: Proposal, slots: Slots, lanes: Int[Array, "lanes"], drafts: int) -> Proposal:
    """Cuts a proposal to `drafts` columns, the request's cap and the tokens it may still emit.

    All of these are known before the drafter draws, so the cut cannot bias what is accepted. A
    lane that executes a prompt chunk does not draft: its drafter has not seen the chunk yet. Nor does one
    that executes the last token of a prompt alone, so that it does not matter where chunks end, nor how much
    of the prompt the prefix cache had.

    Room for n tokens is room for paths of n - 1 draft tokens, however many of a tree's are that short.
    """
    rows = rows_of(lanes)
    room = slots.limits[rows] - slots.text.lengths[rows]
    reachable = room - 1 if proposal.parents is None else leading(proposal.parents, room - 1)
    allowed = jnp.minimum(jnp.minimum(slots.draft_caps[rows], reachable), drafts)
    has_emitted = slots.text.lengths[rows] > slots.known_lengths[rows]
    drafting = (lanes >= 0) & slots.live[rows] & has_emitted
    lengths = jnp.where(drafting, jnp.maximum(jnp.minimum(proposal.lengths, allowed), 0), 0)
    cut = dataclasses.replace(proposal, lengths=lengths, tree_depth=min(proposal.tree_depth, drafts))
    return jax.tree.map(lambda leaf: leaf[:, :drafts] if leaf.ndim >= 2 else leaf, cut)


def pack(
    bucket: Bucket,
    text: Text,
    committed_lengths: Int[Array, "slots"],
    lanes: Int[Array, "lanes"],
    certain_lengths: Int[Array, "lanes"],
    proposal: Proposal,
    verify_lengths: Int[Array, "lanes"],
) -> Nodes:
    """Lays the lanes' certain tokens and verified draft tokens one after the other.

    Positions come from the committed length and the depth, never from a running count of what was tried.
    """
    counts = jnp.where(lanes >= 0, certain_lengths + verify_lengths, 0)
    offsets = jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])
    index = jnp.arange(bucket.nodes + bucket.chunk, dtype=jnp.int32)
    lane = owner(index, offsets)
    within = index - offsets[lane]
    rows = rows_of(lanes)[lane]
    certain = certain_lengths[lane]
    positions = committed_lengths[rows] + within
    tokens = text.tokens[rows, jnp.minimum(positions, text.tokens.shape[1] - 1)]
    parents = None
    num_drafts = proposal.tokens.shape[1]
    if num_drafts:
        draft = jnp.clip(within - certain, 0, num_drafts - 1)
        is_draft = within >= certain
        tokens = jnp.where(is_draft, proposal.tokens[lane, draft], tokens)
        if proposal.parents is not None:
            anchor = certain - 1
            parents = jnp.where(is_draft, anchor + proposal.parents[lane, draft], within - 1)
            depth = anchor + depths(proposal.parents)[lane, draft + 1]
            positions = jnp.where(is_draft, committed_lengths[rows] + depth, positions)
    real = index < offsets[-1]
    return Nodes(
        tokens=jnp.where(real, tokens, 0),
        positions=jnp.where(real, positions, 0),
        offsets=offsets,
        certain_lengths=certain_lengths,
        parents=None if parents is None else jnp.where(real, parents, -1),
    )


def owner(index: Int[Array, "items"], offsets: Int[Array, "bounds"]) -> Int[Array, "items"]:
    """The lane that each packed item belongs to; items past the end go to the last lane."""
    past = index[:, None] >= offsets[None, 1:-1]
    return jnp.sum(past, axis=1, dtype=jnp.int32)


def row_offsets(nodes: Nodes) -> Int[Array, "bounds"]:
    """Where each lane's rows of logits begin: one for its last certain node, one per draft token."""
    counts = jnp.diff(nodes.offsets)
    rows = jnp.where(counts > 0, counts - nodes.certain_lengths + 1, 0)
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(rows, dtype=jnp.int32)])


def row_nodes(bucket: Bucket, nodes: Nodes) -> Int[Array, "rows"]:
    """The node whose logits each row holds; padding rows repeat some real node."""
    offsets = row_offsets(nodes)
    row = jnp.arange(bucket.nodes, dtype=jnp.int32)
    lane = owner(row, offsets)
    node = nodes.offsets[lane] + nodes.certain_lengths[lane] - 1 + row - offsets[lane]
    return jnp.clip(node, 0, bucket.nodes + bucket.chunk - 1)


def commit_path(
    nodes: Nodes,
    verdict_path: Int[Array, "lanes path"],
    commit_lengths: Int[Array, "lanes"],
    width: int,
) -> Int[Array, "lanes commits"]:
    """Packed node that becomes each lane's i-th new token: its certain ones, then the accepted path."""
    certain = nodes.certain_lengths[:, None]
    index = jax.lax.broadcasted_iota(jnp.int32, (commit_lengths.shape[0], width), 1)
    step = jnp.clip(index - (certain - 1), 0, verdict_path.shape[1] - 1)
    accepted = certain - 1 + jnp.take_along_axis(verdict_path, step, axis=1)
    within = jnp.where(index < certain, index, accepted)
    return jnp.where(index < commit_lengths[:, None], nodes.offsets[:-1, None] + within, -1)
