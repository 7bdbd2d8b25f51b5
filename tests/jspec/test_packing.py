import dataclasses

import jax.numpy as jnp
import numpy as np

from jspec.buckets import Bucket
from jspec.drafters.protocol import Text
from jspec.packing import commit_path, limit, owner, pack, row_nodes, row_offsets
from jspec.round import OneHot, Proposal
from jspec.slots import empty_slots


def ints(*values):
    return jnp.array(values, jnp.int32)


def test_owner_skips_lanes_without_items():
    offsets = ints(0, 2, 2, 5)
    assert owner(jnp.arange(7, dtype=jnp.int32), offsets).tolist() == [0, 0, 2, 2, 2, 2, 2]


def packed(certain, drafts, chunk, nodes):
    """Three slots; lanes run slots 2, 0 and padding."""
    text = Text(tokens=jnp.arange(30, dtype=jnp.int32).reshape(3, 10) + 100, lengths=ints(4, 0, 6))
    proposal = Proposal(
        tokens=jnp.array([[1, 2], [3, 4], [5, 6]], jnp.int32),
        lengths=ints(2, 2, 2),
        q=OneHot(),
    )
    bucket = Bucket(lanes=3, nodes=nodes, chunk=chunk)
    lanes = ints(2, 0, -1)
    return bucket, pack(bucket, text, ints(3, 0, 4), lanes, certain, proposal, drafts)


def test_request_does_not_draft_before_it_has_emitted_a_token():
    slots = dataclasses.replace(
        empty_slots(3, 10, 5, 1),
        text=Text(tokens=jnp.zeros((3, 10), jnp.int32), lengths=ints(5, 5, 1)),
        known_lengths=ints(5, 4, 1),
        limits=ints(10, 10, 10),
        draft_caps=ints(2, 2, 2),
        live=jnp.ones((3,), bool),
    )
    proposal = Proposal(tokens=jnp.zeros((3, 2), jnp.int32), lengths=ints(2, 2, 2), q=OneHot())
    cut = limit(proposal, slots, ints(0, 1, 2), 2)
    assert cut.lengths.tolist() == [0, 2, 0]


def test_pack_lays_anchor_and_drafts_at_committed_positions():
    # slot 2 has 4 committed tokens and its anchor at 4; slot 0 has 3 and its anchor at 3.
    bucket, nodes = packed(ints(1, 1, 0), ints(2, 1, 0), chunk=0, nodes=8)
    assert nodes.offsets.tolist() == [0, 3, 5, 5]
    assert nodes.tokens.tolist() == [124, 1, 2, 103, 3, 0, 0, 0]
    assert nodes.positions.tolist() == [4, 5, 6, 3, 4, 0, 0, 0]
    assert nodes.parents is None
    assert row_offsets(nodes).tolist() == [0, 3, 5, 5]
    assert row_nodes(bucket, nodes)[:5].tolist() == [0, 1, 2, 3, 4]


def test_pack_puts_a_prompt_chunk_in_front_and_gives_it_one_row():
    bucket, nodes = packed(ints(2, 3, 0), ints(0, 0, 0), chunk=4, nodes=3)
    assert nodes.tokens.tolist() == [124, 125, 103, 104, 105, 0, 0]
    assert row_offsets(nodes).tolist() == [0, 1, 2, 2]
    assert row_nodes(bucket, nodes)[:2].tolist() == [1, 4]


def test_commit_path_is_certain_tokens_then_the_accepted_path():
    _, nodes = packed(ints(1, 1, 0), ints(2, 1, 0), chunk=0, nodes=8)
    verdict_path = jnp.array([[0, 1, -1], [0, -1, -1], [-1, -1, -1]], jnp.int32)
    path = commit_path(nodes, verdict_path, ints(2, 1, 0), width=4)
    np.testing.assert_array_equal(path, [[0, 1, -1, -1], [3, -1, -1, -1], [-1, -1, -1, -1]])


def test_commit_path_follows_a_tree():
    _, nodes = packed(ints(1, 1, 0), ints(2, 1, 0), chunk=0, nodes=8)
    verdict_path = jnp.array([[0, 2, -1], [0, -1, -1], [-1, -1, -1]], jnp.int32)
    assert commit_path(nodes, verdict_path, ints(2, 1, 0), width=3)[0].tolist() == [0, 2, -1]
