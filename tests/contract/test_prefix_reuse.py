"""Texts that begin alike share pages, and nobody can tell from what comes out."""

import random

import numpy as np
import pytest
from contract.engines import TABLE
from contract.engines import engine as engine_of_table
from contract.engines import shared as table_engine
from contract.reused_prefixes import (
    NAMES,
    PAGE,
    VOCABULARY,
    WINDOWED,
    alone,
    held,
    only_text,
    pieces_of_an_interrupted_one,
    shared,
    spoil,
    tree_pages,
)
from contract.test_use import StopsAt

from jspec.settings import Settings

PROMPT = (0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2, 0, 1)
# What the first turn's last round leaves in the slot then looks like a round before the second turn's first.
GREEDY = Settings(max_tokens=8)
SEEDED = Settings(max_tokens=8, temperature=1.0, seed=1)
PENALISED = Settings(max_tokens=8, repetition_penalty=1.7, frequency_penalty=2.5)


def engine(drafter: str):
    used = shared(drafter)
    used.forget_prefixes()
    return used


def whole_pages(tokens: int) -> int:
    return tokens // PAGE * PAGE


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, array in one.items():
        np.testing.assert_allclose(array, other[name], atol=2e-5, err_msg=name)


@pytest.mark.parametrize("settings", [GREEDY, SEEDED, PENALISED], ids=["greedy", "seeded", "penalised"])
@pytest.mark.parametrize("drafter", NAMES)
def test_second_turn_reuses_the_first_and_equals_a_run_without(drafter, settings):
    used = engine(drafter)
    first = used.generate([PROMPT], settings)[0]
    assert (first.token_ids, first.counters.reused) == (alone(PROMPT, settings), 0)
    admitted = used.programs._admit._cache_size()
    text = (*PROMPT, *first.token_ids)
    turn = (*text, 3, 0, 1)
    spoil(used, keep=tree_pages(used))  # what is not shared may hold anything
    second = used.generate([turn], settings)[0]
    assert (len(text) - 1) % PAGE == 0  # all of the text but the last token, which was never committed
    assert second.counters.reused == whole_pages(len(text) - 1)
    assert second.token_ids == alone(turn, settings)
    with_reuse = held(used, 0)
    used.forget_prefixes()
    again = used.generate([turn], settings)[0]
    assert again.counters.reused == 0
    assert again.token_ids == second.token_ids
    same(with_reuse, held(used, 0))
    assert set(used.programs.traces.values()) == {1}
    assert used.programs._admit._cache_size() == admitted  # the number of reused tokens is no shape


@pytest.mark.parametrize("drafter", NAMES)
@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9])
def test_repeated_prompt_of_any_length(drafter, length):
    used, prompt = engine(drafter), PROMPT[:length]
    for reused in (0, whole_pages(length - 1)):
        result = used.generate([prompt], GREEDY)[0]
        assert (result.token_ids, result.counters.reused) == (alone(prompt, GREEDY), reused)


@pytest.mark.parametrize("drafter", NAMES)
def test_texts_that_part_at_the_end_of_a_page_do_not_share_it(drafter):
    used = engine(drafter)
    used.generate([PROMPT], GREEDY)
    other = (*PROMPT[:8], 3, 3, 2)  # an EAGLE pair at 7 holds token 8
    result = used.generate([other], GREEDY)[0]
    assert result.counters.reused == 4
    with_reuse = held(used, 0)
    used.forget_prefixes()
    assert used.generate([other], GREEDY)[0].token_ids == result.token_ids == alone(other, GREEDY)
    same(with_reuse, held(used, 0))


@pytest.mark.parametrize("drafter", NAMES)
def test_equal_prompts_of_one_call_share_and_shared_pages_are_not_written(drafter):
    used = engine(drafter)
    settings = [GREEDY, SEEDED, GREEDY]
    with used.session() as session:
        session.add([PROMPT] * 3, settings)
        while len(tree_pages(used)) < len(PROMPT) // PAGE:
            session.step()
        before = held(used, 0)
        pieces = []
        while session.busy:
            pieces += session.step()
        results = [session.result(i) for i in range(3)]
    reused = [r.counters.reused for r in results]
    assert reused == [0, 12, 12]
    assert {(piece.index, piece.reused) for piece in pieces} >= {(1, 12), (2, 12)}
    assert [r.token_ids for r in results] == [alone(PROMPT, one) for one in settings]
    used.generate([(*PROMPT, 3)], GREEDY)  # holds slot 0, and reads the same pages
    after = held(used, 0)
    for name, array in before.items():
        if "layer" in name:
            np.testing.assert_array_equal(array[:12], after[name][:12], err_msg=name)


@pytest.mark.parametrize("settings", [PENALISED, SEEDED], ids=["greedy", "seeded"])
@pytest.mark.parametrize("drafter", NAMES)
def test_preempted_request_goes_on_as_if_nothing_had_been(drafter, settings):
    used = engine(drafter)
    free = used.free_pages
    with used.session() as session:
        session.add([PROMPT, (2, 2, 1)], settings)
        pieces = pieces_of_an_interrupted_one(session)
        first, second = session.result(0), session.result(1)
    assert first.token_ids == alone(PROMPT, settings)
    assert second.token_ids == alone((2, 2, 1), settings)
    assert sum((p.token_ids for p in pieces if p.index == 0), ()) == first.token_ids
    counters = first.counters
    assert counters.preemptions >= 2 and counters.reused == 0
    # Each admission emits one token in a round that is not counted.
    assert counters.emitted == counters.committed + 1 + counters.preemptions
    assert used.free_pages == free
    assert set(used.programs.traces.values()) == {1}


def test_windows_keep_the_whole_context_if_the_prefix_cache_is_asked_for():
    assert not shared("plain", WINDOWED).prefix_cache
    used = shared("plain", WINDOWED, prefix_cache=True)
    assert used.prefix_cache
    for reused in (0, 12):
        result = used.generate([PROMPT], GREEDY)[0]
        assert result.counters.reused == reused
        assert result.token_ids == alone(PROMPT, GREEDY, WINDOWED)


def test_new_weights_forget_what_old_ones_computed():
    used = engine("plain")
    used.generate([PROMPT], GREEDY)
    used.models = used.models
    assert used.generate([PROMPT], GREEDY)[0].counters.reused == 0


def test_greater_priority_comes_first_and_takes_the_place_of_a_lesser_one():
    used = engine("ngram")
    with used.session() as session:
        session.add([PROMPT, (2, 2, 1), (1, 1)], GREEDY)
        urgent = session.add([(0, 2), (0, 1)], GREEDY, priority=1)
        order = []
        while session.busy:
            for piece in session.step():
                if piece.index not in order:
                    order.append(piece.index)
            if len(order) == 4 and not urgent[-1] > 4:
                urgent += session.add([(2, 0)], GREEDY, priority=2)
        results = [session.result(i) for i in range(6)]
    assert order[:4] == [3, 4, 0, 1]
    assert order.index(5) < order.index(2)
    preempted = [r.counters.preemptions for r in results]
    assert (
        preempted[5] == 0 and sum(preempted) == 1 and preempted[1] == 1
    )  # the last one to come of the least
    assert [r.token_ids for r in results] == [alone(r.prompt_ids, GREEDY) for r in results]


def test_request_that_does_not_run_cannot_be_preempted():
    with engine("plain").session() as session:
        session.add([PROMPT], GREEDY)
        with pytest.raises(ValueError, match=r"index: expected one of the running requests \[\], got 0"):
            session.preempt(0)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("drafter", ["ngram", "dflash"])
def test_soak_with_evictions_preemptions_and_callers_who_leave(drafter, overlap):
    used, rng = engine(drafter), random.Random(3)
    stems = [[rng.randrange(VOCABULARY - 1) for _ in range(14)] for _ in range(3)]
    kinds = (GREEDY, SEEDED, PENALISED, Settings(max_tokens=4, temperature=1.0), Settings(max_tokens=1))
    reused = preempted = 0
    for _ in range(6):
        with used.session(overlap=overlap) as session:
            asked = []
            for _ in range(6):
                stem = rng.choice(stems)
                extra = [rng.randrange(VOCABULARY - 1) for _ in range(rng.randrange(1, 4))]
                asked.append(((*stem[: rng.randrange(1, 15)], *extra), rng.choice(kinds)))
                session.add([asked[-1][0]], asked[-1][1], priority=rng.randrange(2))
            leaves_early = rng.random() < 0.3
            while session.busy and not (leaves_early and rng.random() < 0.1):
                session.step()
                running = sorted(session._running.values(), key=lambda r: r.index)
                if running and rng.random() < 0.15:
                    session.preempt(rng.choice(running).index)
            for index, (prompt, settings) in enumerate(asked):
                if session._requests[index].finish_reason is None:
                    continue
                result = session.result(index)
                reused += result.counters.reused
                preempted += result.counters.preemptions
                if settings.temperature == 0 or settings.seed is not None:
                    assert result.token_ids == alone(prompt, settings)
        assert used.free_pages == used._pool.num_pages
    assert reused > 50 and preempted > 3
    pages = tree_pages(used)
    assert len(pages) == len(set(pages)) and not set(pages) & set(used._pool._free[0])
    assert len(pages) + len(used._pool._free[0]) == used._pool.num_pages[0]
    assert set(used.programs.traces.values()) == {1}


@pytest.mark.parametrize("count", range(1, 10))
def test_nothing_past_a_stop_string_is_shared(count):
    used = table_engine("oracle")
    used.forget_prefixes()
    prompt = [1] * 2  # so that rounds of 4 tokens do not end with pages
    with used.session() as session:
        session.add([prompt], Settings(max_tokens=20))
        session._requests[0].output = StopsAt(count)
        while session.busy:
            session.step()
        text = (*prompt, *session.result(0).token_ids)
    assert len(text) == 2 + count
    whole = whole_pages(len(text) - 1)
    assert only_text(used) == text[: whole + 1 if whole else 0]


def test_what_a_broken_request_computed_is_not_shared():
    broken = TABLE.copy()
    broken[7] = np.nan
    used = engine_of_table("plain", broken)
    result = used.generate([[1] * 12 + [7]], Settings(max_tokens=3))[0]
    assert result.finish_reason.startswith("error")
    assert used._prefixes.num_shared == 0
    assert used.free_pages == used._pool.num_pages


def test_preempted_request_without_a_seed_draws_with_new_coins():
    uniform = np.zeros_like(TABLE)
    used = engine_of_table("plain", uniform, prefix_cache=False)  # every prompt round begins at length 0
    with used.session() as session:
        session.add([[1]], Settings(max_tokens=12, temperature=1.0))
        while session.busy:
            if session.step() and session.num_running:  # not before it has emitted: nothing of it is shared
                session.preempt(0)
        assert len(set(session.result(0).token_ids)) > 3
