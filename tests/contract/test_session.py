"""A session that never ends: requests are prepared elsewhere, cancelled and forgotten."""

import pytest
from contract.engines import engine, shared

from jspec.settings import Settings


def free(used):
    return used.free_pages, sorted(used._runner.free_slots)


@pytest.mark.parametrize("rounds", [0, 1, 3])
def test_cancelled_request_leaves_its_slot_at_once(rounds):
    used = shared("oracle")
    before = free(used)
    whole = used.generate([[2]], Settings(max_tokens=30))[0]
    with used.session() as session:
        first, second, third = session.add([[1], [2], [3]], Settings(max_tokens=30))
        pieces = [piece for _ in range(rounds) for piece in session.step()]
        session.cancel(first)
        session.cancel(third)  # it waits for one of two slots
        session.cancel(first)  # once more changes nothing
        assert session.num_waiting + session.num_running == 1
        while session.busy:
            later = session.step()
            assert {piece.index for piece in later} <= {second}
            pieces += later
        assert session.result(second).token_ids == whole.token_ids
        assert session.result(first).finish_reason == "cancelled"
        assert len(session.result(first).token_ids) == sum(
            len(p.token_ids) for p in pieces if p.index == first
        )
    assert free(used) == before


def test_slot_of_a_cancelled_request_serves_the_next():
    used = shared("oracle")
    whole = used.generate([[5]], Settings(max_tokens=9, temperature=1.0, seed=4))[0]
    with used.session() as session:
        for cancelled in session.add([[1], [2]], Settings(max_tokens=30)):
            session.step()
            session.cancel(cancelled)
        (index,) = session.add([[5]], Settings(max_tokens=9, temperature=1.0, seed=4))
        while session.busy:
            session.step()
        assert session.result(index).token_ids == whole.token_ids


def test_session_forgets_what_has_ended():
    with shared("oracle").session() as session:
        (index,) = session.add([[1]], Settings(max_tokens=3))
        with pytest.raises(ValueError, match="has not; cancel it first"):
            session.forget(index)
        while session.busy:
            session.step()
        session.forget(index)
        assert not session._requests
        assert session.add([[1]]) == [index + 1]  # a number is never given twice


def test_requests_prepared_elsewhere_run_as_added_ones():
    used = shared("oracle")
    settings = Settings(max_tokens=6, log_probs=1)
    with used.session() as session:
        indices = session.enqueue(used.prepare([[1], [2]], settings))
        pieces = []
        while session.busy:
            pieces += session.step()
        for index, own in zip(indices, used.generate([[1], [2]], settings), strict=True):
            result = session.result(index)
            assert (result.token_ids, result.log_probs) == (own.token_ids, own.log_probs)
            mine = [piece for piece in pieces if piece.index == index]
            assert tuple(row for piece in mine for row in piece.log_probs) == own.log_probs
            assert [piece.verified is None for piece in mine] == [True] + [False] * (len(mine) - 1)
            assert sum(piece.verified or 0 for piece in mine) == own.counters.verified


def test_bias_of_everything_but_a_stop_still_needs_no_minimum():
    used = engine("plain", eos_ids=(7,))
    with pytest.raises(ValueError, match="min_tokens"):
        used.prepare([[1]], Settings(allowed_token_ids=(7,), min_tokens=1))
    assert used.prepare([[1]], Settings(min_tokens=1))
