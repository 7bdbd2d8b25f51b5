"""Rounds that execute a prompt's chunk and decode change nothing but when tokens come."""

import dataclasses

import numpy as np
import pytest
from contract.engines import DRAFTERS, engine, shared
from contract.reused_prefixes import alone, pieces_of_an_interrupted_one
from contract.reused_prefixes import shared as decoder_engine
from contract.test_grammar import FORM, WORDS, letters
from contract.test_overlap import PROMPTS, SETTINGS, without_inert

from jspec.grammar.grammar import Grammar
from jspec.settings import Settings

LONG = [[i % 8 for i in range(21)], [3, 3, 1] * 7, *PROMPTS]
# What a sampled request without a seed draws depends on where its prompt's last chunk begins.
LONG_SETTINGS = [dataclasses.replace(s, seed=i) for i, s in enumerate([SETTINGS[0], SETTINGS[1], *SETTINGS])]


def run(used, *, mixed, overlap=False, grammar_overlap=None, prompts=LONG, settings=LONG_SETTINGS):
    """Results, and the buckets of the rounds."""
    used.forget_prefixes()
    used._runner._rng = np.random.default_rng(7)
    free, buckets = used.free_pages, []
    with used.session(
        mixed=mixed,
        overlap=overlap,
        grammar_overlap=grammar_overlap,
        observer=lambda requests, bucket, round_, report: buckets.append(bucket),
    ) as session:
        indices = session.add(prompts, settings)
        while session.busy:
            session.step()
        results = [session.result(index) for index in indices]
        assert not any(request.executing for request in session._requests.values())
    assert used.free_pages == free and len(used._runner.free_slots) == used.max_slots
    return results, buckets


def are_mixed(buckets):
    return [bucket for bucket in buckets if bucket.chunk and bucket.lanes > 1]


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.extended), True])
@pytest.mark.parametrize(
    "drafter",
    [name if name == "ngram" else pytest.param(name, marks=pytest.mark.extended) for name in DRAFTERS],
)
def test_results_are_those_of_prompts_executed_alone(drafter, overlap):
    used = shared(drafter, mixed_chunks=(3,), max_slots=3)
    mixed, buckets = run(used, mixed=True, overlap=overlap)
    unmixed, others = run(used, mixed=False, overlap=overlap)
    assert without_inert(mixed) == without_inert(unmixed)
    assert are_mixed(buckets) and not are_mixed(others)
    assert sum(not bucket.chunk for bucket in buckets) < sum(not bucket.chunk for bucket in others)
    assert set(used.programs.traces.values()) == {1}


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *(
            pytest.param(n, marks=pytest.mark.extended)
            for n in ("plain", "ngram", "dflash", "dspark", "eagle3", "eagle3-tree")
        ),
    ],
)
def test_reused_prefixes_and_what_the_drafter_keeps(name, overlap):
    """Texts are those of solo runs, though a prompt's chunks begin behind pages of the prefix cache."""
    used = decoder_engine(name, mixed_chunks=(3,), max_slots=3)
    shared_text = (0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2, 0, 1)
    prompts = [shared_text, (*shared_text, 3, 3, 0), (2, 1) * 8, shared_text[:9], (1, 1, 2) * 5]
    settings = [Settings(max_tokens=9 + i, temperature=i % 2 * 1.0, seed=i) for i in range(5)]
    results, buckets = run(used, mixed=True, overlap=overlap, prompts=prompts, settings=settings)
    expected = [alone(tuple(p), s) for p, s in zip(prompts, settings, strict=True)]
    assert [r.token_ids for r in results] == expected
    assert sum(r.counters.reused for r in results) >= 16
    assert are_mixed(buckets)
    used.forget_prefixes()
    with used.session(mixed=True, overlap=overlap) as session:
        session.add(prompts[:3], settings[:3])
        pieces_of_an_interrupted_one(session, every=2)
        assert [session.result(i).token_ids for i in range(3)] == expected[:3]
        assert session.result(0).counters.preemptions >= 2
    assert set(used.programs.traces.values()) == {1}


def test_running_requests_get_tokens_while_a_long_prompt_is_executed():
    used = shared("ngram", mixed_chunks=(3,), max_slots=3)
    for mixed in (True, False):
        used.forget_prefixes()
        with used.session(mixed=mixed) as session:
            first, second = session.add([[1], [2]], Settings(max_tokens=40, draft_length=0))
            for _ in range(2):
                session.step()
            (third,) = session.add([[5, 4] * 10], Settings(max_tokens=2))
            rounds = []
            while not session._requests[third].token_ids:
                rounds.append([piece.index for piece in session.step()])
        if mixed:
            assert rounds == [[first, second]] * 4 + [[first, second, third]]  # 20 prompt tokens, 4 a round
        else:
            assert rounds == [[], [], [third]]


@pytest.mark.extended
def test_prompt_log_probs_beside_other_requests():
    used = shared("ngram", mixed_chunks=(3,), max_slots=3)
    settings = [Settings(max_tokens=20), *[Settings(max_tokens=4, prompt_log_probs=True, log_probs=2)] * 2]
    prompts = [[1], [3, 3, 1, 5] * 3, [7, 2, 2, 6, 1, 0]]
    mixed, buckets = run(used, mixed=True, prompts=prompts, settings=settings)
    others, _ = run(used, mixed=False, prompts=prompts, settings=settings)
    assert are_mixed(buckets)
    assert [len(r.prompt_log_probs or ()) for r in mixed] == [0, 11, 5]
    for one, other in zip(mixed, others, strict=True):
        assert one.token_ids == other.token_ids
        for mine, its in zip(one.prompt_log_probs or (), other.prompt_log_probs or (), strict=True):
            assert (mine.token_id, mine.log_prob) == (its.token_id, pytest.approx(its.log_prob, abs=1e-5))


@pytest.mark.parametrize("grammar_overlap", ["two", "one"])
def test_grammars_beside_prompts(grammar_overlap):
    """Of requests that decode, of the prompt's own, and of one that ends meanwhile; each as it is alone."""
    used, form = letters("oracle", mixed_chunks=(3,)), Grammar(regex="([ab][cd]){40}")
    settings = [
        Settings(max_tokens=24, temperature=1.3, seed=0, grammar=form, draft_length=1),
        Settings(max_tokens=9, temperature=1.3, seed=1, grammar=WORDS),
        Settings(max_tokens=24, grammar=form),  # without it the target ends the text at once
        Settings(max_tokens=9, temperature=1.3, seed=3),
        Settings(max_tokens=9, grammar=Grammar(regex=FORM)),
        Settings(max_tokens=9, temperature=1.0, seed=5, grammar=Grammar(regex=FORM)),
    ]
    prompts = [[1, 4, 2], [3], [5, 4] * 10, [6] * 17, [3, 1, 1, 0] * 3, [2, 0, 5] * 3]
    expected = [
        letters("oracle").generate([prompt], dataclasses.replace(one, draft_length=0))[0]
        for prompt, one in zip(prompts, settings, strict=True)
    ]
    results, buckets = run(
        used, mixed=True, overlap=True, grammar_overlap=grammar_overlap, prompts=prompts, settings=settings
    )
    assert [(r.token_ids, r.finish_reason) for r in results] == [
        (r.token_ids, r.finish_reason) for r in expected
    ]
    # The first request decodes beside all of the second's prompt, one round, and of the third's, five.
    assert all(bucket in are_mixed(buckets) for bucket in buckets[1:7])
    assert set(used.programs.traces.values()) == {1}


@pytest.mark.extended
@pytest.mark.parametrize("overlap", [False, True])
def test_a_schedule_decides_for_the_running_requests(overlap):
    # Of its own: what a schedule has seen decides whether it tries drafts at all.
    used = engine("confident", costs=_Dear(), max_slots=3, mixed_chunks=(3,))
    settings = [Settings(max_tokens=20 - i, temperature=i % 2 * 1.1, seed=i) for i in range(5)]
    prompts = [[1], [2], [5, 4] * 9, [6] * 11, [3, 1, 1, 0] * 3]
    results, buckets = run(used, mixed=True, overlap=overlap, prompts=prompts, settings=settings)
    plain, _ = run(shared("plain"), mixed=False, prompts=prompts, settings=settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    assert {bool(bucket.budget) for bucket in are_mixed(buckets)} == {False, True}
    assert all(r.counters.budget >= r.counters.verified for r in results)


@dataclasses.dataclass(frozen=True)
class _Dear:
    """Rounds that draft pay while nothing is known of the requests, and for those of great confidence."""

    def round_seconds(self, requests, bucket, context):
        return 1.0 + 0.6 * bucket.budget


@pytest.mark.extended
def test_warm_engine_compiles_nothing_more():
    used = engine("ngram", mixed_chunks=(3, 7), max_slots=3)
    used.warm_up(prompt_lengths=[8], lanes=3)
    warm = dict(used.programs.traces)
    _, buckets = run(used, mixed=True)
    assert dict(used.programs.traces) == warm
    assert {b.chunk for b in are_mixed(buckets)} == {3, 7}
    assert all((kind, bucket) in warm for bucket in buckets for kind in ("propose", "execute", "settle"))


def test_one_slot_has_no_mixed_programs():
    used = engine("plain", mixed_chunks=(3,), max_slots=1)
    used.warm_up(prompt_lengths=[8])
    assert not are_mixed({bucket for _, bucket in used.programs.traces if bucket})
    assert {b.lanes for _, b in used.programs.traces if b} == {1}


def test_mixed_chunks_have_to_fit():
    with pytest.raises(ValueError, match="mixed_chunks: expected ascending sizes from 1 to 7"):
        engine("plain", mixed_chunks=(3, 15))
