"""How an engine is used: what may be passed, several streams at once, callers who leave or fail."""

import dataclasses

import jax
import numpy as np
import pytest
from contract.engines import TABLE, VOCABULARY, engine, shared

from jspec.settings import Settings


def line(token: int, count: int) -> tuple[int, ...]:
    tokens = []
    for _ in range(count):
        token = int(TABLE[token].argmax())
        tokens.append(token)
    return tuple(tokens)


@dataclasses.dataclass(frozen=True)
class StopsAt:
    """Stands in for a request's text: a stop string is complete with the n-th token."""

    count: int
    text: str = ""

    def push(self, token_ids, *, last):
        seen = self.__dict__.setdefault("seen", [])
        seen.extend(token_ids)
        before = len(seen) - len(token_ids)
        return "", self.count - before - 1 if before < self.count <= len(seen) else None


@pytest.mark.parametrize("count", range(1, 8))
def test_counters_end_where_a_stop_string_ends(count):
    used = shared("oracle")
    session = used.session()
    session.add([[1]], Settings(max_tokens=20))
    session._requests[0].output = StopsAt(count)
    pieces = []
    while session.busy:
        pieces += session.step()
    result = session.result(0)
    assert result.token_ids == line(1, count)
    assert result.finish_reason == "stop"
    counters = result.counters
    assert counters.proposed >= counters.verified >= counters.accepted
    assert counters.accepted == sum(sum(p.drafted) for p in pieces)
    assert counters.committed + 1 == counters.emitted == count


@pytest.mark.parametrize(
    "prompts",
    [
        [1, 2],
        (1, 2),
        np.array([1, 2]),
        [np.array([1, 2], np.uint8)],
        [(1, 2)],
        np.array([[1, 2]]),
    ],
    ids=["list", "tuple", "array", "list of arrays", "list of tuples", "matrix"],
)
def test_ids_may_come_in_any_sequence(prompts):
    assert [r.token_ids for r in shared("plain").generate(prompts, Settings(max_tokens=3))] == [line(2, 3)]


def test_no_prompts_give_no_results():
    assert shared("plain").generate([]) == []
    assert list(shared("plain").stream([])) == []


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        (b"ab", "prompts: expected text, token ids or chat messages, or a list of these, got b'ab'"),
        ([[1], b"ab"], r"prompts\[1\]: expected text, token ids or chat messages, got b'ab'"),
    ],
)
def test_what_is_no_prompt_is_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        shared("plain").generate(prompts)


def test_settings_of_any_whole_type_and_size():
    huge = Settings(max_tokens=2**40, draft_length=2**40, stop_token_ids=(line(1, 1)[0],), min_tokens=0)
    small = Settings(max_tokens=250)
    object.__setattr__(small, "max_tokens", np.uint8(250))  # annotations are enforced only in tests
    first, second = shared("oracle").generate([[1], [2] * 10], [huge, small])
    assert first.token_ids == line(1, 1)
    assert len(second.token_ids) == 64 - 10


def test_minimum_length_of_any_size_keeps_a_stop_away():
    settings = Settings(max_tokens=2**40, min_tokens=2**40, stop_token_ids=(line(1, 1)[0],))
    result = shared("plain").generate([[1]], settings)[0]
    assert len(result.token_ids) == 63
    assert line(1, 1)[0] not in result.token_ids


def test_streams_on_one_engine_do_not_disturb_each_other():
    used = shared("cut1")
    free = used.free_pages
    left, right = used.stream([[4]], Settings(max_tokens=10)), used.stream([[2]], Settings(max_tokens=9))
    collected: dict[int, tuple[int, ...]] = {0: (), 1: ()}
    open_streams = {0: left, 1: right}
    while open_streams:
        for name, stream in list(open_streams.items()):
            piece = next(stream, None)
            if piece is None:
                del open_streams[name]
            else:
                collected[name] += piece.token_ids
    assert collected == {0: line(4, 10), 1: line(2, 9)}
    assert used.free_pages == free


def test_stream_that_finds_every_slot_taken_says_what_is_missing():
    used = shared("cut1")
    first, second = (
        used.stream([[1], [3]], Settings(max_tokens=12)),
        used.stream([[2]], Settings(max_tokens=9)),
    )
    pieces = [next(first), next(first)]  # each of them has a slot now
    with pytest.raises(
        RuntimeError, match=r"prompts\[0\]: expected a free slot and cache for 10 tokens, got 0 slots"
    ):
        next(second)
    pieces += first
    for index, token in enumerate((1, 3)):
        assert tuple(t for p in pieces if p.index == index for t in p.token_ids) == line(token, 12)


@pytest.mark.parametrize("program", ["admit", "propose", "execute", "settle"])
@pytest.mark.parametrize("problem", [KeyboardInterrupt, RuntimeError])
def test_engine_stays_usable_after_a_failure_in_a_round(program, problem, monkeypatch):
    used = shared("oracle")
    free = used.free_pages
    real, calls = getattr(used.programs, program), []

    def fails_the_second_time(*args):
        calls.append(args)
        if len(calls) == 2:
            raise problem("planted")
        return real(*args)

    monkeypatch.setattr(used.programs, program, fails_the_second_time)
    with pytest.raises(problem, match="planted"):
        used.generate([[1], [2], [3]], Settings(max_tokens=9))
    monkeypatch.undo()
    assert used.free_pages == free
    results = used.generate([[3], [1], [2]], Settings(max_tokens=9))
    assert [r.token_ids for r in results] == [line(t, 9) for t in (3, 1, 2)]


def test_caller_who_fails_between_rounds_frees_everything():
    used = shared("oracle")
    free = used.free_pages

    def fails(index):
        raise KeyError(index)

    with pytest.raises(KeyError):
        used.generate([[1], [2], [3]], Settings(max_tokens=3), on_finish=fails)
    assert used.free_pages == free
    assert used.generate([[1]], Settings(max_tokens=3))[0].token_ids == line(1, 3)


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9, 16, 17, 62])
def test_prompts_around_the_sizes_of_chunks(length):
    prompt = [i % VOCABULARY for i in range(length)]
    for drafter in ("plain", "oracle"):
        result = shared(drafter).generate([prompt, [1]], Settings(max_tokens=2))
        assert [r.token_ids for r in result] == [line(prompt[-1], 2), line(1, 2)]


def test_sizes_that_do_not_divide_each_other():
    used = engine("oracle", max_context=13, page_size=5, chunks=(31,), cache_tokens=17, max_slots=3)
    results = used.generate([[1], [2] * 9, [3] * 12, [4]], Settings(max_tokens=20))
    assert [r.token_ids for r in results] == [line(1, 12), line(2, 4), line(3, 1), line(4, 12)]
    assert set(used.programs.traces.values()) == {1}


def test_warm_engine_compiles_nothing_more_and_has_drawn_nothing():
    used = engine("oracle")
    used.warm_up(prompt_lengths=(2, 9), lanes=2)
    assert used._runner._rng.bit_generator.state == np.random.default_rng(0).bit_generator.state
    warm = dict(used.programs.traces)
    results = used.generate([[1, 2], [3] * 9, [4, 4]], [Settings(max_tokens=n) for n in (5, 9, 2)])
    assert [r.token_ids for r in results] == [line(2, 5), line(3, 9), line(4, 2)]
    assert dict(used.programs.traces) == warm


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"page_size": 0}, "page_size: expected at least 1, got 0"),
        ({"cache_tokens": 0}, "cache_tokens: expected at least 1, got 0"),
    ],
)
def test_sizes_of_the_cache_are_refused_by_their_own_name(options, message):
    with pytest.raises(ValueError, match=message):
        engine("plain", **options)


def test_pages_that_kernels_for_a_tpu_cannot_take_are_told(monkeypatch, caplog):
    def told(page_size: int) -> list[str]:
        caplog.clear()
        engine("plain", page_size=page_size)
        return [r.getMessage() for r in caplog.records if "plain XLA" in r.getMessage()]

    assert not told(4)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert told(4) == [
        "attention: plain XLA instead of the kernels for TPU, as page_size 4 is no multiple of 128"
    ]
    assert not told(128)
