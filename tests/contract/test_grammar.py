"""Answers have the form that was asked for, and within it the target's law, whatever the drafter does."""

import contextlib
import dataclasses
import functools
import re

import jax.numpy as jnp
import numpy as np
import pytest
from contract.chi_square import z_score
from contract.engines import DRAFTERS, TABLE, VOCABULARY, shared
from contract.letters import END, letters_tokenizer

from jspec.decode import Models
from jspec.grammar.compiler import GrammarCompiler
from jspec.grammar.grammar import Grammar
from jspec.settings import Settings

PROMPT = [1, 4, 2]
TOKENS = 4
REQUESTS = 400
# Answers of one token and of many, some complete at once and some that may end or go on.
FORM = "(ab|c|bc)+d|a|cb?"
WORDS = Grammar(choice=["abcd", "dcba", "bcab"])


def extended(*drafters: str) -> list:
    return [pytest.param(drafter, marks=pytest.mark.extended) for drafter in drafters]


FEW = ["oracle", *extended(*(name for name in DRAFTERS if name != "oracle"))]


def run(session, settings, prompts):
    session.add(prompts, settings)
    with session:
        while session.busy:
            session.step()
        return [session.result(index) for index in range(len(settings))]


@functools.cache
def compiler() -> GrammarCompiler:
    return GrammarCompiler(letters_tokenizer(), VOCABULARY, (END,))


def letters(drafter: str, **options):
    return shared(drafter, tokenizer=letters_tokenizer(), eos_ids=(END,), max_slots=3, **options)


def masked_probs(text: tuple[int, ...], temperature: float) -> np.ndarray | None:
    """The target's law behind an answer so far, over what the grammar allows; None where it is complete.

    From a matcher that has seen this answer and nothing else.
    """
    matcher = compiler().matcher(Grammar(regex=FORM))
    for token in text:
        matcher.accept(token)
    if matcher.complete:
        return None
    bits = matcher.allowed()
    logits = TABLE[(*PROMPT, *text)[-1]].astype(np.float64) / temperature
    allowed = np.asarray([bits[0] >> id_ & 1 for id_ in range(VOCABULARY)], bool)
    weights = np.where(allowed, np.exp(logits - logits[allowed].max()), 0)
    return weights / weights.sum()


def joint(temperature: float) -> dict[tuple[int, ...], float]:
    law, growing = {}, {(): 1.0}
    while growing:
        text, probability = growing.popitem()
        probs = masked_probs(text, temperature) if len(text) < TOKENS else None
        if probs is None:
            law[text] = probability
            continue
        growing |= {(*text, token): probability * p for token, p in enumerate(probs) if p > 0}
    return law


def counts_of(decoder, settings: Settings, requests: int) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], int] = {}
    for result in decoder.generate([PROMPT] * requests, settings):
        counts[result.token_ids] = counts.get(result.token_ids, 0) + 1
    return counts


@pytest.mark.parametrize(
    "drafter", ["oracle", *extended("plain", "dense", "fork", "tree", "dflash2", "eagle3", "eagle3-tree")]
)
def test_law_of_the_masked_target(drafter):
    settings = Settings(max_tokens=TOKENS, temperature=1.0, grammar=Grammar(regex=FORM))
    counts = counts_of(letters(drafter), settings, REQUESTS)
    assert abs(z_score(counts, joint(1.0), REQUESTS)) < 4


@pytest.mark.extended
def test_law_under_block_verification():
    settings = Settings(max_tokens=TOKENS, temperature=1.0, grammar=Grammar(regex=FORM))
    counts = counts_of(letters("dense", block_verification=True), settings, REQUESTS)
    assert abs(z_score(counts, joint(1.0), REQUESTS)) < 4


@pytest.mark.extended
def test_the_test_sees_another_law():
    settings = Settings(max_tokens=TOKENS, temperature=0.6, grammar=Grammar(regex=FORM))
    counts = counts_of(letters("dense"), settings, REQUESTS)
    assert abs(z_score(counts, joint(1.0), REQUESTS)) > 4


@dataclasses.dataclass(frozen=True)
class Rising:
    """Costs at which a part of the draft tokens pays."""

    def round_seconds(self, requests: int, bucket, context: int) -> float:
        return 1.0 + 0.15 * bucket.nodes


@pytest.mark.extended
def test_a_schedule_keeps_the_law_and_the_form():
    used = letters("confident", costs=Rising())
    settings = Settings(max_tokens=TOKENS, temperature=1.0, grammar=Grammar(regex=FORM))
    assert abs(z_score(counts_of(used, settings, REQUESTS), joint(1.0), REQUESTS)) < 4
    mixed = [
        Settings(max_tokens=9, temperature=1.0, seed=seed, grammar=Grammar(regex=FORM) if seed % 2 else None)
        for seed in range(8)
    ]
    results = used.generate([PROMPT] * 8, mixed)
    assert 0 < sum(r.counters.verified for r in results) < sum(r.counters.proposed for r in results)
    alone = used.generate([PROMPT] * 8, [dataclasses.replace(one, draft_length=0) for one in mixed])
    assert [r.token_ids for r in results] == [r.token_ids for r in alone]


@pytest.mark.parametrize("drafter", FEW)
def test_greedy_is_the_masked_targets_line(drafter):
    expected, text = [], ()
    while (probs := masked_probs(text, 1.0)) is not None and len(text) < 9:
        text = (*text, int(probs.argmax()))
    expected = text
    result = letters(drafter).generate([PROMPT], Settings(max_tokens=9, grammar=Grammar(regex=FORM)))[0]
    assert result.token_ids == expected


@pytest.mark.parametrize("drafter", FEW)
def test_requests_with_and_without_grammar_share_a_batch(drafter):
    """Each is what plain decoding makes of it alone, drafts or none, greedy, sampled or seeded."""
    form = Grammar(regex=FORM)
    settings = [
        Settings(max_tokens=9, grammar=WORDS),
        Settings(max_tokens=9),
        Settings(max_tokens=9, temperature=1.3, seed=4, grammar=form),
        Settings(max_tokens=9, temperature=1.3, seed=5),
        Settings(max_tokens=9, grammar=form, draft_length=0),
        Settings(max_tokens=9, temperature=1.0, seed=6, grammar=form, draft_length=1, top_k=3),
    ]
    prompts = [PROMPT, [3, 0], [5], [6, 6], [2], [1, 0]]
    alone = [
        letters(drafter).generate([prompt], dataclasses.replace(one, draft_length=0))[0].token_ids
        for prompt, one in zip(prompts, settings, strict=True)
    ]
    results = letters(drafter).generate(prompts, settings)
    assert [result.token_ids for result in results] == alone
    for result, one in zip(results, settings, strict=True):
        if one.grammar is WORDS:
            assert result.text in ("abcd", "dcba", "bcab")
        if one.grammar is form and result.finish_reason == "stop":
            assert re.fullmatch(FORM, result.text)


def always(*tokens: int) -> np.ndarray:
    """A table whose greedy line goes round these tokens."""
    table = np.zeros((VOCABULARY, VOCABULARY), np.float32)
    for here, there in zip(tokens, (*tokens[1:], tokens[0]), strict=True):
        table[here, there] = 9.0
    return table


@contextlib.contextmanager
def table_of(drafter: str, table: np.ndarray):
    """The shared engine, on another table of the target (which is the oracle's, too)."""
    used = letters(drafter)
    models = used.models
    params = (jnp.asarray(table),)
    used.models = Models(target=params, drafter=params if drafter == "oracle" else models.drafter)
    yield used
    used.models = models


@pytest.fixture
def looping():
    """The target wants abc abc abc ..., and the oracle drafts it past any end."""
    with table_of("oracle", always(0, 1, 2)) as used:
        yield used


@pytest.mark.parametrize("length", range(1, 8))
def test_the_block_is_cut_where_the_grammar_is_complete(looping, length):
    """On the device, wherever in a block of four that is, and though the oracle drafts on behind it."""
    text = "abcabcabc"[:length]
    form = Grammar(regex="".join(f"[{letter}d]" for letter in text))
    for settings in (Settings(max_tokens=20), Settings(max_tokens=20, temperature=0.01, seed=1)):
        emitted: list[int] = []
        session = looping.session(observer=lambda *round_: emitted.append(int(round_[-1].emitted[0])))  # noqa: B023
        (result,) = run(session, [dataclasses.replace(settings, grammar=form)], [[2]])
        assert (result.text, result.finish_reason) == (text, "stop")
        assert sum(emitted) == len(result.token_ids) == result.counters.emitted == length
        assert result.counters.committed == length - 1  # the first token comes from the prompt's round


def test_a_grammar_that_is_complete_at_the_last_token_allowed_stops(looping):
    result = looping.generate([[2]], Settings(max_tokens=4, grammar=Grammar(regex="[ad]bc[ad]")))[0]
    assert (result.text, result.finish_reason) == ("abca", "stop")
    result = looping.generate([[2]], Settings(max_tokens=3, grammar=Grammar(regex="[ad]bc[ad]")))[0]
    assert (result.text, result.finish_reason) == ("abc", "length")


def test_stop_ids_and_grammar_share_the_first_stop(looping):
    form = Grammar(regex="([ad][bd][cd])+")
    stopped = looping.generate([[2]], Settings(max_tokens=20, stop_token_ids=(1,), grammar=form))[0]
    assert (stopped.token_ids, stopped.finish_reason) == ((0, 1), "stop")
    text = looping.generate([[2]], Settings(max_tokens=20, stop=("ca",), grammar=form))[0]
    assert (text.text, text.finish_reason) == ("ab", "stop")


def test_end_of_sequence_ends_a_form_that_could_go_on():
    table = always(0, 1, 2)
    table[2] = 0
    table[2, END], table[2, 0] = 9.0, 8.0
    form = Grammar(regex="([ad][bd][cd])+")
    with table_of("oracle", table) as ends:
        result = ends.generate([[2]], Settings(max_tokens=20, grammar=form))[0]
        assert (result.token_ids, result.finish_reason) == ((0, 1, 2, END), "stop")
        ignoring = Settings(max_tokens=7, grammar=form, ignore_eos=True)
        assert ends.generate([[2]], ignoring)[0].text == "abcabca"


def test_form_that_may_not_end_yet_is_not_ended():
    table = always(0, 1, 2)
    table[1] = 0
    table[1, END] = 9.0
    with table_of("oracle", table) as ends:
        result = ends.generate([[2]], Settings(max_tokens=9, grammar=Grammar(regex="[ad]b[cd]")))[0]
    assert result.text in ("abc", "abd")


@pytest.mark.parametrize("marker", ["ca", "cab", "b"])
def test_grammar_begins_behind_the_marker_wherever_in_a_block_that_is(looping, marker):
    """The target thinks abcabc...; behind the marker it has to say d's."""
    for before, line in ((1, "cabcabc"), (2, "abcabc"), (0, "bcabc")):
        form = Grammar(regex="d{3}", after=marker)
        for draft_length in (0, None):
            settings = Settings(max_tokens=20, grammar=form, draft_length=draft_length)
            result = looping.generate([[before]], settings)[0]
            assert result.text == line[: line.index(marker) + len(marker)] + "ddd"
            assert result.finish_reason == "stop"


def test_text_that_ends_before_its_marker_has_no_form(looping):
    result = looping.generate([[2]], Settings(max_tokens=5, grammar=Grammar(regex="d", after="dd")))[0]
    assert (result.text, result.finish_reason) == ("abcab", "length")


@pytest.mark.parametrize("overlap", [False, True])
def test_grammars_are_moved_on_by_emitted_tokens_only(overlap):
    session = letters("oracle").session(overlap=overlap)
    form = Grammar(regex="[abcd]{15}")
    settings = Settings(max_tokens=14, temperature=1.0, seed=2, grammar=form)
    session.add([PROMPT, [3]], settings)
    requests = [session._requests[index] for index in (0, 1)]
    with session:
        steps = 0
        while session.busy:
            session.step()
            steps += 1
            if steps in (3, 5) and requests[0].finish_reason is None:
                session.preempt(0)
            for request in requests:
                assert request.constraint.taken == len(request.token_ids)
                assert request.constraint._matcher._tokens == request.token_ids
    assert requests[0].preemptions > 0
    alone = letters("oracle").generate([PROMPT], dataclasses.replace(settings, draft_length=0))[0]
    assert tuple(requests[0].token_ids) == alone.token_ids


def test_request_whose_grammar_cannot_go_on_fails_alone():
    """The table has no "x": the form can be begun and not be ended."""
    dead, fine = Grammar(regex="ab?x"), Grammar(regex="[ad]bc")
    settings = [
        Settings(max_tokens=9, grammar=dead),
        Settings(max_tokens=9, grammar=fine),
        Settings(max_tokens=9),
    ]
    used = letters("oracle")
    for draft_length, overlap in ((0, False), (None, False), (None, True)):
        asked = [dataclasses.replace(one, draft_length=draft_length) for one in settings]
        results = run(used.session(overlap=overlap), asked, [[2]] * 3)
        assert results[0].finish_reason.startswith("error: the grammar allows nothing here")
        assert results[1].text in ("abc", "dbc")
        assert results[2].finish_reason in ("stop", "length")
        assert used.free_pages == used._pool.num_pages


@pytest.mark.parametrize("draft_length", [0, 1, None])
def test_grammar_that_cannot_go_on_fails_behind_the_same_token_with_drafts(looping, draft_length):
    """The oracle drafts "abc" and more; behind that the form needs an "x", which no token spells."""
    form = Grammar(regex="[ad][bd]c?x")
    for settings in (Settings(max_tokens=9), Settings(max_tokens=9, temperature=0.01, seed=1)):
        asked = dataclasses.replace(settings, grammar=form, draft_length=draft_length)
        result = looping.generate([[2]], asked)[0]
        assert result.token_ids == (0, 1, 2)
        assert result.finish_reason.startswith("error: the grammar allows nothing here")


@pytest.mark.parametrize(("kind", "inert"), [("two", 0), ("one", 1)])
def test_round_behind_the_end_of_a_grammar_is_inert_and_counted(looping, kind, inert):
    """That of the other request goes on; both ends of a form, by a draft token and by a bonus, are late."""
    settings = [
        Settings(max_tokens=20, grammar=Grammar(regex="[ad][bd][cd][ad][bd]")),
        Settings(max_tokens=20, grammar=Grammar(regex="[ad][bd]"), draft_length=0),
        Settings(max_tokens=20),
    ]
    results = run(looping.session(overlap=True, grammar_overlap=kind), settings, [[2]] * 3)
    assert [result.text for result in results] == ["abcab", "ab", "abcabcabcabcabcabcab"]
    assert [result.counters.inert for result in results[:2]] == [inert, inert]
    assert len(looping._runner.free_slots) == 3


def test_settings_that_leave_nothing_of_a_grammar_fail_the_request():
    settings = Settings(max_tokens=5, grammar=WORDS, allowed_token_ids=(6,))
    assert letters("oracle").generate([PROMPT], settings)[0].finish_reason.startswith("error: ")


@pytest.mark.parametrize("overlap", ["none", "one"])
@pytest.mark.parametrize("drafter", ["oracle", *extended("dense")])
def test_overlap_changes_no_token_and_no_count(drafter, overlap):
    settings = [
        Settings(max_tokens=9, temperature=1.0, seed=seed, grammar=Grammar(regex=FORM) if seed % 3 else None)
        for seed in range(6)
    ]
    expected, results = (
        run(letters(drafter).session(overlap=kind == "one", grammar_overlap=kind), settings, [PROMPT] * 6)
        for kind in ("two", overlap)
    )
    for one, two in zip(results, expected, strict=True):
        assert one.token_ids == two.token_ids
        assert dataclasses.replace(one.counters, inert=0) == two.counters


@pytest.mark.parametrize("drafter", ["oracle", *extended("dense")])
def test_programs_are_traced_once_with_and_without_grammar(drafter):
    used = letters(drafter)
    before = used.programs.traces.copy()
    for form in (None, Grammar(regex=FORM)):
        used.generate([PROMPT, [1], [2]], Settings(max_tokens=7, grammar=form))
    assert set((used.programs.traces - before).values()) <= {1}
