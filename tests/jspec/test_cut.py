import jax.numpy as jnp
import pytest

from jspec.cut import Finish, cut

A, B, STOP, C, D, E = 1, 2, 9, 3, 4, 5


def cut_one(block, length, room, stops=(STOP, -1)):
    kept, finish = cut(
        jnp.array([block], jnp.int32),
        jnp.array([length], jnp.int32),
        jnp.array([stops], jnp.int32),
        jnp.array([room], jnp.int32),
    )
    return int(kept[0]), Finish(int(finish[0]))


def test_stop_before_the_limit_wins_over_length():
    assert cut_one([A, B, STOP, C, D, E], 6, room=5) == (3, Finish.STOP)


def test_stop_past_the_limit_does_not_count():
    assert cut_one([A, B, C, D, E, STOP], 6, room=5) == (5, Finish.LENGTH)


def test_stop_as_the_last_allowed_token_is_a_stop():
    assert cut_one([A, B, STOP, C], 4, room=3) == (3, Finish.STOP)


@pytest.mark.parametrize("index", range(5))
def test_first_stop_in_block_cuts_at_every_index(index):
    block = [A, B, C, D, E]
    block[index] = STOP
    block[4] = STOP
    assert cut_one(block, 5, room=100) == (index + 1, Finish.STOP)


def test_stop_behind_the_block_is_ignored():
    assert cut_one([A, B, STOP, STOP], 2, room=9) == (2, Finish.RUNNING)


def test_lane_that_emits_nothing_does_not_finish():
    assert cut_one([STOP, A], 0, room=0) == (0, Finish.RUNNING)


def test_padding_stop_id_matches_no_token():
    assert cut_one([A, -1, -1], 3, room=9, stops=(-1, -1)) == (3, Finish.RUNNING)
