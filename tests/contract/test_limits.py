"""Where requests end, what fails alone, and what is refused before anything runs."""

import functools

import numpy as np
import pytest
from contract.engines import DRAFTERS, TABLE, engine, shared

from jspec.settings import Settings


def line(token: int, count: int, table=TABLE) -> list[int]:
    tokens = []
    for _ in range(count):
        token = int(table[token].argmax())
        tokens.append(token)
    return tokens


def cycle() -> np.ndarray:
    """A table whose greedy line counts up: 0 1 2 ... 7 0 1 ..."""
    return (np.roll(np.eye(8), 1, axis=1) * 5).astype(np.float32)


@pytest.mark.parametrize("drafter", ["plain", "oracle", "ngram", "cut2"])
@pytest.mark.parametrize("stop", range(1, 7))
def test_request_ends_at_the_first_stop_wherever_it_falls_in_the_block(drafter, stop):
    used = _cycle_engine(drafter)
    result = used.generate(
        [[6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0]], Settings(max_tokens=20, stop_token_ids=(stop,))
    )[0]
    assert result.token_ids == tuple(range(1, stop + 1))
    assert result.finish_reason == "stop"
    assert result.counters.emitted == stop
    # The first token comes from the prompt's round; after it every committed node emitted one token.
    assert result.counters.committed == stop - 1
    assert result.counters.accepted <= stop


@functools.cache
def _cycle_engine(drafter):
    return engine(drafter, cycle())


@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 5])
def test_exactly_max_tokens(drafter, max_tokens):
    result = shared(drafter).generate([[5, 5, 5, 5]], Settings(max_tokens=max_tokens, ignore_eos=True))[0]
    assert len(result.token_ids) == max_tokens
    assert result.finish_reason == "length"


def test_last_rounds_are_no_wider_than_what_may_still_be_emitted(monkeypatch):
    used = engine("oracle")
    widths, real = [], used.programs.propose

    def noted(bucket, *args):
        widths.append(bucket.nodes)
        return real(bucket, *args)

    monkeypatch.setattr(used.programs, "propose", noted)
    # The prompt's round emits 1 token; a round of 1 + 3 nodes emits 4; one token is left: no draft.
    result = used.generate([[1]], Settings(max_tokens=6))[0]
    assert result.token_ids == tuple(line(1, 6))
    assert widths == [1, 4, 1]


@pytest.mark.parametrize("eos_ids", [(), (7,), (7, 2)])
def test_any_number_of_end_tokens(eos_ids):
    used = engine("oracle", eos_ids=eos_ids)
    tokens = used.generate([[1]], Settings(max_tokens=12))[0].token_ids
    expected = line(1, 12)
    ends = [i for i, token in enumerate(expected) if token in eos_ids]
    assert tokens == tuple(expected[: ends[0] + 1] if ends else expected)
    assert used.generate([[1]], Settings(max_tokens=12, ignore_eos=True))[0].token_ids == tuple(expected)


@pytest.mark.parametrize("drafter", ["plain", "oracle"])
def test_request_ends_with_its_context(drafter):
    used = engine(drafter, max_context=16)
    result = used.generate([[1] * 10], Settings(max_tokens=50))[0]
    assert len(result.token_ids) == 6
    assert result.finish_reason == "length"


@pytest.mark.parametrize("drafter", ["plain", "oracle", "dense"])
def test_nan_fails_one_request_and_not_its_neighbour(drafter):
    broken = TABLE.copy()
    broken[7] = np.nan
    used = engine(drafter, broken)
    warm = Settings(max_tokens=8, temperature=1.0, seed=3, allowed_token_ids=(0, 1, 2, 3, 4, 5, 6))
    bad, good = used.generate([[7], [1]], [warm, warm])
    assert bad.finish_reason.startswith("error")
    assert bad.token_ids == ()
    assert good.token_ids == shared("plain").generate([[1]], warm)[0].token_ids
    again = used.generate([[1]], warm)[0]
    assert again.token_ids == good.token_ids


def test_everything_is_free_after_a_drain_and_after_an_early_close():
    used = shared("oracle")
    free = used.free_pages
    used.generate([[1]] * 7, Settings(max_tokens=5))
    assert used.free_pages == free
    stream = used.stream([[1], [2]], Settings(max_tokens=30))
    next(stream)
    assert used.free_pages != free
    stream.close()
    assert used.free_pages == free
    assert used.generate([[1]], Settings(max_tokens=6))[0].token_ids == tuple(line(1, 6))


def test_second_shorter_request_on_a_slot_starts_afresh():
    used = engine("ngram", max_slots=1)
    used.generate([[1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3, 4]], Settings(max_tokens=9))
    second = used.generate([[5, 6]], Settings(max_tokens=7))[0]
    fresh = engine("ngram", max_slots=1).generate([[5, 6]], Settings(max_tokens=7))[0]
    assert second == fresh


def test_stream_gives_the_result_piece_by_piece():
    used = shared("cut2")
    result = used.generate([[1]], Settings(max_tokens=11))[0]
    pieces = list(used.stream([[1]], Settings(max_tokens=11)))
    assert tuple(t for p in pieces for t in p.token_ids) == result.token_ids
    assert sum(sum(p.drafted) for p in pieces) == result.counters.accepted
    assert [p.finish_reason for p in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert pieces[-1].finish_reason == "length"


@pytest.mark.parametrize("drafter", ["plain", "oracle", "varying"])
def test_log_probabilities_are_the_models_own(drafter):
    settings = Settings(max_tokens=9, log_probs=2, temperature=0.7, seed=4, frequency_penalty=1.0)
    result = shared(drafter).generate([[3]], settings)[0]
    last = 3
    for entry, token in zip(result.log_probs, result.token_ids, strict=True):
        row = TABLE[last].astype(np.float64)
        row = row - np.log(np.exp(row).sum())
        best = np.argsort(-row)[:2]
        assert entry.token_id == token
        np.testing.assert_allclose(entry.log_prob, row[token], atol=1e-5)
        assert [id_ for id_, _ in entry.top] == best.tolist()
        np.testing.assert_allclose([p for _, p in entry.top], row[best], atol=1e-5)
        last = token


@pytest.mark.parametrize(
    ("prompts", "settings", "message"),
    [
        ([[]], None, r"prompts\[0\]: expected at least one token"),
        ([[1], [1, 99]], None, r"prompts\[1\]: expected ids below 8, got 99"),
        ([[1] * 64], None, r"prompts\[0\]: expected at most 63 tokens, got 64"),
        (["text"], None, r"prompts\[0\]: expected token ids"),
        ([[1]], Settings(stop=("x",)), "stop: expected no stop strings"),
        ([[1]], Settings(log_probs=3), "log_probs: expected at most 2, got 3"),
        ([[1]], Settings(stop_token_ids=(1, 2, 3, 4, 5)), "stop_token_ids: expected at most 4"),
        ([[1]], Settings(stop_token_ids=(8,)), "stop_token_ids: expected ids below"),
        ([[1], [2]], [Settings()], "settings: expected one, or 2"),
        (
            [[1], [2]],
            [Settings(), Settings(stop_token_ids=(8,))],
            r"settings\[1\].stop_token_ids: expected ids",
        ),
        ([[1], [2]], [Settings(), Settings(log_probs=3)], r"settings\[1\].log_probs: expected at most 2"),
    ],
)
def test_bad_requests_are_refused_before_anything_runs(prompts, settings, message):
    used = shared("plain")
    free = used.free_pages
    with pytest.raises(ValueError, match=message):
        used.generate(prompts, settings)
    assert used.free_pages == free


def test_request_that_the_cache_can_never_hold_is_refused():
    with pytest.raises(ValueError, match=r"prompts\[0\]: expected at most 8 tokens with its answer, got 12"):
        engine("plain", cache_tokens=8).generate([[1, 2]], Settings(max_tokens=10))


def test_requests_wait_for_pages_and_all_finish():
    used = engine("oracle", max_slots=2, cache_tokens=16)
    results = used.generate([[1], [2], [3], [4]], Settings(max_tokens=9))
    assert [r.token_ids for r in results] == [tuple(line(t, 9)) for t in (1, 2, 3, 4)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_context": 1}, "max_context: expected 2 to 64"),
        ({"max_context": 65}, "max_context: expected 2 to 64"),
        ({"max_slots": 0}, "max_slots: expected at least 1"),
        ({"chunks": ()}, "chunks: expected ascending"),
        ({"chunks": (7, 3)}, "chunks: expected ascending"),
    ],
)
def test_sizes_that_fit_no_bucket_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        engine("plain", **options)
