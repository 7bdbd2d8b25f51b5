"""Prompt lookup against a search in plain Python, and the policy that keeps free text fast."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.drafters.ngram import Ngram, NgramState, continuations, ngram
from jspec.drafters.protocol import Committed, Text
from jspec.sampling import SamplingTable
from jspec.targets.view import TargetView

CAPACITY = 24


def search(
    text: list[int], draft_length: int, min_n: int, max_n: int, count: int
) -> list[tuple[list[int], int]]:
    """What `continuations` should find: tokens and match length, best first."""
    found: list[tuple[list[int], int]] = []
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(text) - 1, n - 1, -1):
            follow = text[end : end + draft_length]
            known = any(before[: len(follow)] == follow for before, _ in found)
            if text[end - n : end] == text[len(text) - n :] and not known:
                found.append((follow, n))
    return found[:count]


def padded(texts: list[list[int]], filler: int = 0) -> tuple[jax.Array, jax.Array]:
    rows = np.full((len(texts), CAPACITY), filler, np.int32)
    for row, text in zip(rows, texts, strict=True):
        row[: len(text)] = text
    return jnp.asarray(rows), jnp.asarray([len(text) for text in texts], jnp.int32)


@functools.cache
def compiled(draft_length: int, min_n: int, max_n: int, count: int):
    kind = dict(draft_length=draft_length, min_n=min_n, max_n=max_n, count=count)
    return jax.jit(functools.partial(continuations, **kind))


SIZES = [(1, 1, 1, 1), (3, 1, 3, 1), (4, 2, 4, 3), (7, 2, 5, 4), (2, 3, 3, 2)]


@settings(max_examples=200, deadline=None)
@given(
    size=st.sampled_from(SIZES),
    texts=st.lists(st.lists(st.integers(0, 2), max_size=CAPACITY), min_size=2, max_size=2),
    filler=st.sampled_from([-1, 0, 1]),
)
def test_finds_what_a_search_by_hand_finds(size, texts, filler):
    draft_length, min_n, max_n, count = size
    found = compiled(*size)(*padded(texts, filler))
    for lane, text in enumerate(texts):
        expected = search(text, draft_length, min_n, max_n, count)
        lengths = found.lengths[lane].tolist()
        assert lengths == [len(follow) for follow, _ in expected] + [0] * (count - len(expected))
        for index, (follow, n) in enumerate(expected):
            assert found.tokens[lane, index, : len(follow)].tolist() == follow
            assert found.match_lengths[lane, index] == n


def test_longest_match_wins_then_the_most_recent():
    #        the last two, 1 2, occur three times; only the first time behind a 9
    text = [9, 1, 2, 3, 8, 1, 2, 4, 8, 1, 2, 5, 9, 1, 2]
    tokens, lengths = padded([text])
    found = continuations(tokens, lengths, draft_length=2, min_n=1, max_n=2, count=3)
    assert found.tokens[0].tolist() == [[5, 9], [4, 8], [3, 8]]
    found = continuations(tokens, lengths, draft_length=2, min_n=1, max_n=3, count=3)
    assert found.tokens[0].tolist() == [[3, 8], [5, 9], [4, 8]]
    assert found.match_lengths[0].tolist() == [3, 2, 2]


def test_never_runs_past_the_known_text():
    tokens, lengths = padded([[7, 7, 7]], filler=7)
    found = continuations(tokens, lengths, draft_length=5, min_n=1, max_n=2, count=3)
    assert found.lengths[0].tolist() == [1, 2, 0]  # 7; then 7 7, found one place earlier


@functools.cache
def compiled_drafter(drafter: Ngram):
    return jax.jit(drafter.absorb, donate_argnums=2), jax.jit(drafter.draft)


class Engine:
    """Plays the rounds of an engine for the drafter: `emit` is what `settle` does to the text."""

    def __init__(self, drafter: Ngram, view: TargetView, greedy: SamplingTable):
        max_slots = view.cache.lengths.shape[0]
        self.drafter, self.view, self.greedy = drafter, view, greedy
        self.text = Text(
            tokens=jnp.full((max_slots, CAPACITY), -7, jnp.int32), lengths=jnp.zeros((max_slots,), jnp.int32)
        )
        self.state: NgramState = drafter.init((), view, max_slots)
        self.committed = [0] * max_slots
        self.absorb, self.propose = compiled_drafter(drafter)

    def admit(self, slot: int, prompt: list[int], emitted: list[int]) -> int:
        self.committed[slot] = 0
        self.text = Text(
            tokens=self.text.tokens.at[slot, : len(prompt)].set(jnp.asarray(prompt)),
            lengths=self.text.lengths.at[slot].set(len(prompt)),
        )
        return self.emit([slot], [emitted])[0]

    def emit(self, lanes: list[int], emitted: list[list[int]], is_first: bool = False) -> list[int]:
        context_lengths = [self.committed[max(slot, 0)] for slot in lanes]
        tokens, lengths = np.array(self.text.tokens), np.array(self.text.lengths)
        for slot, block in zip(lanes, emitted, strict=True):
            if slot >= 0:
                tokens[slot, lengths[slot] : lengths[slot] + len(block)] = block
                lengths[slot] += len(block)
                self.committed[slot] = int(lengths[slot]) - 1
        self.text = Text(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths))
        committed = Committed(
            features=jnp.zeros((1, 0)),
            positions=jnp.zeros((1,), jnp.int32),
            path=jnp.full((len(lanes), 1), -1, jnp.int32),
            context_lengths=jnp.asarray(context_lengths, jnp.int32),
            is_first=(jnp.asarray(context_lengths, jnp.int32) == 0) | is_first,
        )
        self.state, ready = self.drafter.absorb(
            (), self.view, self.state, jnp.asarray(lanes), self.text, committed
        )
        return ready.tolist()

    def draft(self, *lanes: int) -> list[list[int]]:
        out = self.propose((), self.view, self.state, jnp.asarray(lanes), self.text, self.greedy)
        assert out.parents is None
        return [row[:length] for row, length in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]


def test_proposes_what_followed_and_announces_its_length(view, greedy):
    engine = Engine(ngram(draft_length=3, min_n=2, max_n=2), view, greedy)
    assert engine.draft(0) == [[]]
    assert engine.admit(0, [1, 2, 3, 4, 5, 1], [2]) == 3
    assert engine.draft(0) == [[3, 4, 5]]
    assert engine.emit([0], [[3, 6]]) == [0]
    assert engine.draft(0) == [[]]


def test_wrong_continuations_raise_the_match_length_and_right_ones_lower_it(view, greedy):
    engine = Engine(ngram(draft_length=2, min_n=1, max_n=3), view, greedy)

    def required() -> int:
        return int(engine.state.required[0])

    assert engine.admit(0, [1, 2, 3, 1], [2]) == 2 and required() == 1
    assert engine.emit([0], [[1]]) == [0] and required() == 2  # 3 was proposed, 1 came: now 2 must agree
    assert engine.draft(0) == [[]]
    assert engine.emit([0], [[2]]) == [2] and required() == 1  # 2 was found, not drafted, and came
    assert engine.draft(0) == [[1, 2]]
    assert engine.emit([0], [[9]]) == [0] and required() == 2
    assert engine.emit([0], [[9]]) == [0] and required() == 2  # nothing was found: nothing to judge


def test_request_that_the_prefix_cache_begins_where_the_last_one_ended_is_judged_by_its_own(view, greedy):
    engine = Engine(ngram(draft_length=2, min_n=1, max_n=3), view, greedy)
    engine.admit(0, [1, 2, 3, 1], [2])
    engine.emit([0], [[1]])
    assert engine.state.required.tolist() == [2, 1, 1]
    engine.emit([0], [[1]], is_first=True)
    assert engine.state.required.tolist() == [1, 1, 1]


def test_every_match_is_drafted_if_not_adaptive(view, greedy):
    engine = Engine(ngram(draft_length=2, min_n=1, max_n=3, adaptive=False), view, greedy)
    engine.admit(0, [1, 2, 3, 1], [2])
    assert engine.emit([0], [[1]]) == [2]
    assert engine.state.required.tolist() == [1, 1, 1]


def test_second_request_on_a_slot_knows_nothing_of_the_first(view, greedy):
    drafter = ngram(draft_length=3, min_n=1, max_n=2)
    fresh, used = Engine(drafter, view, greedy), Engine(drafter, view, greedy)
    used.admit(1, [1, 2, 3, 1, 2, 3, 1, 2], [3])
    used.emit([1], [[9, 1]])  # 1 was expected
    assert int(used.state.required[1]) > 1
    prompts = ([3, 1, 3], [1])
    for engine in (fresh, used):
        assert engine.admit(1, *prompts) == 2
        assert engine.draft(1) == [[3, 1]]
    assert int(used.state.required[1]) == int(fresh.state.required[1])


def test_stale_search_is_not_drafted_before_the_first_round_of_a_new_request(view, greedy):
    engine = Engine(ngram(draft_length=3, min_n=1, max_n=2), view, greedy)
    engine.admit(0, [1, 2, 1], [2])
    engine.text = Text(tokens=engine.text.tokens, lengths=engine.text.lengths.at[0].set(1))
    assert engine.draft(0) == [[]]


def test_padding_lanes_change_nothing_and_lanes_may_come_in_any_order(view, greedy):
    drafter = ngram(draft_length=3, min_n=1, max_n=2)
    one, other = Engine(drafter, view, greedy), Engine(drafter, view, greedy)
    for engine in (one, other):
        engine.admit(0, [1, 2, 1], [2])
        engine.admit(2, [4, 5, 4], [5])
    ready = one.emit([0, 2], [[1], [4, 5]])
    permuted = other.emit([-1, 2, 0, -1], [[], [4, 5], [1], []])
    assert permuted == [0, ready[1], ready[0], 0]
    jax.tree.map(np.testing.assert_array_equal, one.state, other.state)
    assert other.draft(2, -1, 0) == [one.draft(2)[0], [], one.draft(0)[0]]


def test_one_trace_serves_every_text():
    traces = []

    @jax.jit
    def search(tokens, lengths):
        traces.append(1)
        return continuations(tokens, lengths, draft_length=3, min_n=1, max_n=2)

    for length in (0, 1, 5, CAPACITY):
        search(jnp.zeros((1, CAPACITY), jnp.int32), jnp.full((1,), length, jnp.int32))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(draft_length=0), "draft_length: expected at least 1, got 0"),
        (dict(min_n=0), "min_n: expected 1 to max_n = 5, got 0"),
        (dict(min_n=4, max_n=3), "min_n: expected 1 to max_n = 3, got 4"),
        (dict(num_continuations=0), "num_continuations: expected at least 1, got 0"),
    ],
)
def test_sizes_out_of_order_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        ngram(**arguments)
