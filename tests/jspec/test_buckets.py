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
