"""Launching a round before the one before it is read changes nothing but when the host does its work."""

import dataclasses

import numpy as np
import pytest
from contract.engines import DRAFTERS, TABLE, engine, shared
from contract.reused_prefixes import alone, only_text, pieces_of_an_interrupted_one, tree_pages
from contract.reused_prefixes import shared as decoder_engine
from contract.test_use import StopsAt, line

from jspec import planner
from jspec.buckets import Bucket
from jspec.runner import Launched, Runner
from jspec.schedule.relay import Relay
from jspec.settings import Settings
from jspec.timings import Timings

PROMPTS = [[1, 2, 3], [4], [5] * 9, [7, 2], [2, 2], [6] * 17, [3, 1]]
SETTINGS = [
    Settings(max_tokens=12, log_probs=2),
    Settings(max_tokens=9, temperature=1.1, seed=5, log_probs=1),
    Settings(max_tokens=11, temperature=0.9),
    Settings(max_tokens=14, stop_token_ids=(line(2, 3)[-1],)),
    Settings(max_tokens=1),
    Settings(max_tokens=8, temperature=1.3, frequency_penalty=1.0, min_tokens=4, stop_token_ids=(0, 1)),
    Settings(max_tokens=13, draft_length=1),
]


def run(used, overlap, prompts=PROMPTS, settings=SETTINGS, outputs=None):
    """Results of a session that begins as every other one does."""
    used.forget_prefixes()
    used._runner._rng = np.random.default_rng(7)
    free = used.free_pages
    with used.session(overlap=overlap) as session:
        indices = session.add(prompts, settings)
        for index, output in (outputs or {}).items():
            session._requests[index].output = output
        while session.busy:
            session.step()
        results = [session.result(index) for index in indices]
        assert sum(r.counters.inert for r in results) == session.inert_lanes
        assert not any(request.executing for request in session._requests.values())
    assert used.free_pages == free and len(used._runner.free_slots) == used.max_slots
    return results


def without_inert(results):
    return [dataclasses.replace(r, counters=dataclasses.replace(r.counters, inert=0)) for r in results]


@pytest.mark.parametrize(
    "drafter",
    [
        name if name in ("ngram", "dense") else pytest.param(name, marks=pytest.mark.extended)
        for name in DRAFTERS
    ],
)
def test_everything_but_inert_lanes_is_as_without_overlap(drafter):
    used = shared(drafter)
    with_overlap, without = run(used, True), run(used, False)
    assert without_inert(with_overlap) == without
    assert sum(r.counters.inert for r in with_overlap) > 0 or drafter == "ngram"
    assert set(used.programs.traces.values()) == {1}


def test_drafter_without_a_token_for_a_while_is_not_waited_for(monkeypatch):
    """The text goes round a circle of eight tokens: nothing is found on the first round, all on the next."""
    monkeypatch.setattr(planner, "PATIENCE", 3)
    used = engine("ngram", 3 * np.roll(np.eye(8, dtype=np.float32), 1, axis=1))
    results, ahead = {}, []
    for overlap in (False, True):
        with used.session(overlap=overlap) as session:
            session.add([[0]], Settings(max_tokens=24))
            while session.busy:
                session.step()
                ahead.append(bool(session._flights) and not session._requests[0].ready)
            results[overlap] = session.result(0)
    assert sum(ahead) == 4
    assert results[True].token_ids == results[False].token_ids == tuple(i % 8 for i in range(1, 25))
    assert results[True].counters.rounds == results[False].counters.rounds + 1


@pytest.mark.parametrize("drafter", ["plain", "oracle"])
@pytest.mark.parametrize("count", [1, 2, 4, 6])
def test_stop_string_ends_a_request_that_the_device_goes_on_with(drafter, count):
    used = shared(drafter)
    settings = Settings(max_tokens=20)
    with_overlap, without = (
        run(used, overlap, [[1], [2]], settings, {0: StopsAt(count)}) for overlap in (True, False)
    )
    assert without_inert(with_overlap) == without
    assert with_overlap[0].token_ids == line(1, count) and with_overlap[0].finish_reason == "stop"
    # Its first token ends its prompt's round, and the next prompt waits for that to be read.
    assert with_overlap[0].counters.inert == (count > 1)


def test_a_lane_is_inert_only_if_its_end_could_not_be_foreseen():
    used = shared("plain")
    stop = line(2, 3)[-1]
    by_length, by_token = run(
        used, True, [[1], [2]], [Settings(max_tokens=5), Settings(max_tokens=20, stop_token_ids=(stop,))]
    )
    assert len(by_length.token_ids) == 5 and by_length.counters.inert == 0
    assert by_token.finish_reason == "stop" and by_token.counters.inert == 1


@pytest.mark.parametrize("overlap", [True, False])
def test_the_next_round_is_launched_before_the_one_before_it_is_read(overlap, monkeypatch):
    used, events = shared("plain"), []
    launch, read = Runner.launch, Launched.read
    monkeypatch.setattr(Runner, "launch", lambda *a, **k: events.append("launch") or launch(*a, **k))
    monkeypatch.setattr(Launched, "read", lambda self: events.append("read") or read(self))
    used.forget_prefixes()
    with used.session(overlap=overlap) as session:
        session.add([[1] * 20], Settings(max_tokens=4))  # 3 rounds for the prompt, 3 more
        while session.busy:
            session.step()
        assert session.result(0).token_ids == line(1, 4)
    if overlap:
        assert events == ["launch", *["launch", "read"] * 5, "read"]
    else:
        assert events == ["launch", "read"] * 6


def test_timings_are_of_one_round_at_a_time():
    used, timings = shared("plain"), Timings()
    with used.session(overlap=True, timings=timings) as session:
        session.add([[1]], Settings(max_tokens=6))
        while session.busy:
            session.step()
            assert not session._flights
    assert timings.rounds == 5


def test_a_round_that_is_measured_is_not_launched_ahead():
    with shared("plain").session(overlap=True) as session:
        session.add([[1]], Settings(max_tokens=6))
        with pytest.raises(ValueError, match="bucket: expected None in a session with overlap"):
            session.step(Bucket(lanes=1, nodes=1, chunk=0))


@pytest.mark.parametrize("drafter", ["plain", "oracle"])
def test_cancelled_request_gives_nothing_of_the_round_in_flight_and_its_slot_and_pages_serve_the_next(
    drafter,
):
    used = engine(drafter, max_slots=2, cache_tokens=40)
    free = used.free_pages
    with used.session(overlap=True) as session:
        first, second = session.add([[1], [2]], Settings(max_tokens=18))
        for _ in range(3):
            session.step()
        assert session._flights
        session.cancel(first)
        assert session.result(first).counters.inert == session.inert_lanes == 1
        (third,) = session.add([[5, 4]], Settings(max_tokens=17))  # fits only into the pages of the first
        pieces = []
        while session.busy:
            pieces += session.step()
        assert first not in {piece.index for piece in pieces}
        assert session.result(second).token_ids == line(2, 18)
        assert session.result(third).token_ids == line(4, 17)
    assert used.free_pages == free


def test_nothing_is_left_in_flight_when_all_have_gone():
    used = shared("oracle")
    with used.session(overlap=True) as session:
        indices = session.add([[1], [2]], Settings(max_tokens=30))
        for _ in range(3):
            session.step()
        for index in indices:
            session.cancel(index)
        assert not session.busy and not session._flights and session.inert_lanes == 2
        assert session.step() == []
        (index,) = session.add([[3]], Settings(max_tokens=5))
        while session.busy:
            session.step()
        assert session.result(index).token_ids == line(3, 5)
    with used.session(overlap=True) as session:  # left with a round in flight
        session.add([[1], [2]], Settings(max_tokens=30))
        session.step()
    assert run(used, True, [[1]], Settings(max_tokens=9))[0].token_ids == line(1, 9)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(Settings(max_tokens=9), marks=pytest.mark.extended),
        Settings(max_tokens=9, temperature=1.0, seed=3),
    ],
)
def test_preempted_request_goes_on_as_if_the_round_in_flight_had_not_been(settings):
    used = decoder_engine("ngram")
    used.forget_prefixes()
    prompt, other = (0, 1, 2, 1, 0, 2, 2, 1, 0), (2, 2, 1)
    with used.session(overlap=True) as session:
        session.add([prompt, other], settings)
        pieces = pieces_of_an_interrupted_one(session, every=2)  # after one, none is in flight
        assert [r.executing for r in session._requests.values()] == [0, 0]
        results = [session.result(0), session.result(1)]
    assert [r.token_ids for r in results] == [alone(prompt, settings), alone(other, settings)]
    assert sum((p.token_ids for p in pieces if p.index == 0), ()) == results[0].token_ids
    counters = results[0].counters
    assert counters.preemptions >= 2 and counters.inert >= 2
    assert counters.emitted == counters.committed + 1 + counters.preemptions


def test_a_broken_request_spoils_nothing_with_a_round_of_it_in_flight():
    broken = TABLE.copy()
    broken[7] = np.nan
    used = engine("oracle", broken)
    without_nan = Settings(max_tokens=8, temperature=1.0, seed=3, allowed_token_ids=(0, 1, 2, 3, 4, 5, 6))
    prompts = [[1] * 12 + [7], [1] * 12, [1] * 12 + [7]]
    with_overlap, without = (run(used, overlap, prompts, without_nan) for overlap in (True, False))
    assert without_inert(with_overlap) == without
    assert [r.finish_reason.split(":")[0] for r in with_overlap] == ["error", "length", "error"]


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 9])
def test_nothing_past_a_stop_string_is_shared_though_the_device_went_further(count):
    used = shared("oracle")
    run(used, True, [[1] * 2], Settings(max_tokens=20), {0: StopsAt(count)})
    text = (1, 1, *line(1, count))
    pages = (len(text) - 1) // 4
    assert only_text(used) == text[: 4 * pages + 1 if pages else 0]
    again = run_without_forgetting(used, [*text, 3])
    assert again == run(used, False, [[*text, 3]], Settings(max_tokens=9))[0].token_ids


def run_without_forgetting(used, prompt):
    with used.session(overlap=True) as session:
        session.add([prompt], Settings(max_tokens=9))
        while session.busy:
            session.step()
        return session.result(0).token_ids


def test_equal_prompts_share_as_many_pages_as_without_overlap():
    used = decoder_engine("ngram")
    prompt = (0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2, 0, 1)
    results = {overlap: run(used, overlap, [prompt] * 3, Settings(max_tokens=6)) for overlap in (True, False)}
    assert [r.counters.reused for r in results[True]] == [0, 12, 12]
    assert without_inert(results[True]) == results[False]
    pages = tree_pages(used)
    assert len(pages) == len(set(pages)) and not set(pages) & set(used._pool._free[0])


def test_the_schedule_sees_nothing_younger_than_two_rounds(monkeypatch):
    used = shared("confident", costs=_Flat(), max_slots=2)
    seen = []
    resolve = Relay.resolve

    def noted(self, round_, slots):
        known = resolve(self, round_, slots)
        if known is not None and (known.generations > 0).any():
            seen.append(round_ - int(known.rounds.max()))
        return known

    monkeypatch.setattr(Relay, "resolve", noted)
    settings = [
        Settings(max_tokens=25),
        Settings(max_tokens=20, temperature=1.1, seed=2),
        Settings(max_tokens=9),
    ]
    results = run(used, True, [[1], [2], [3]], settings)
    assert min(seen) == 2 and len(seen) > 8
    assert [r.token_ids for r in results] == [
        r.token_ids for r in shared("plain").generate([[1], [2], [3]], settings)
    ]
    assert all(r.scheduled and r.counters.verified for r in results)


@dataclasses.dataclass(frozen=True)
class _Flat:
    def round_seconds(self, requests, bucket, context):
        return 1.0
