import pytest

from jspec.buckets import Bucket, Ladder

LADDER = Ladder(max_slots=6, draft_length=7, chunks=(15, 63))


def test_no_draft_tokens_is_the_plain_step():
    assert LADDER.decode(1, [0]) == Bucket(lanes=1, nodes=1, chunk=0)
    assert LADDER.decode(3, [0, 0, 0]) == Bucket(lanes=4, nodes=4, chunk=0)


@pytest.mark.parametrize(("drafts", "nodes"), [(1, 4), (3, 4), (4, 8), (7, 8)])
def test_decode_has_room_for_all_drafts(drafts, nodes):
    assert LADDER.decode(1, [drafts]) == Bucket(lanes=1, nodes=nodes, chunk=0)


def test_lanes_share_the_room_for_drafts():
    bucket = LADDER.decode(3, [7, 0, 0])
    assert bucket.lanes == 4
    assert bucket.nodes - bucket.lanes >= 7


def test_lanes_stop_at_max_slots():
    assert LADDER.lanes(5) == 6
    with pytest.raises(ValueError, match="lanes: expected 1 to 6, got 7"):
        LADDER.lanes(7)


@pytest.mark.parametrize(("remaining", "chunk"), [(1, 15), (16, 15), (17, 63), (64, 63), (500, 63)])
def test_prefill_takes_the_smallest_chunk_that_holds_the_rest(remaining, chunk):
    assert LADDER.prefill(remaining) == Bucket(lanes=1, nodes=1, chunk=chunk)


def test_mixed_rounds_have_all_lanes_and_few_sizes():
    ladder = Ladder(max_slots=6, draft_length=7, chunks=(15, 63), mixed_chunks=(15, 31))
    assert ladder.mixed(200, [0, 0]) == Bucket(lanes=6, nodes=6, chunk=31)
    assert ladder.mixed(16, [7]) == Bucket(lanes=6, nodes=24, chunk=15)
    assert ladder.mixed(17, [7] * 5) == Bucket(lanes=6, nodes=48, chunk=31)
    every = ladder.every_mixed(100)
    assert {(b.nodes, b.chunk) for b in every} == {(n, c) for n in (6, 12, 24, 48) for c in (15, 31)}
    assert {b.chunk for b in ladder.every_mixed(9)} == {15}


@pytest.mark.parametrize("mixed", [(31, 15), (0,), (15, 127)])
def test_mixed_chunks_are_refused_if_they_do_not_fit(mixed):
    with pytest.raises(ValueError, match="mixed_chunks: expected ascending sizes from 1 to 63"):
        Ladder(max_slots=6, draft_length=7, chunks=(15, 63), mixed_chunks=mixed)
