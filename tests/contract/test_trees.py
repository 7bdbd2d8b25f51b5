"""Trees that are right down to some depth: what is accepted, cut, counted and refused."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from contract.engines import DRAFTERS, FORK, TABLE, engine, shared
from contract.tree_drafters import leaves_of

from jspec.decode import Models
from jspec.drafters.ngram import ngram
from jspec.loading import with_drafter
from jspec.settings import Settings


def line(token: int, count: int) -> list[int]:
    tokens = []
    for _ in range(count):
        token = int(TABLE[token].argmax())
        tokens.append(token)
    return tokens


@functools.cache
def fork():
    return engine("fork")


def right_for(right: int, proposes: int = FORK.draft_length):
    used = fork()
    drafter = (jnp.asarray(TABLE), jnp.int32(right), jnp.int32(proposes))
    used.models = Models(target=used.models.target, drafter=drafter)
    return used


@pytest.mark.parametrize("right", range(FORK.depth + 1))
def test_rounds_accept_the_right_path_and_no_more(right):
    leaves, expected, length = leaves_of(FORK), [], 3
    while length < 2 + 30:  # the first token comes from the prompt's round
        room = 2 + 30 - length
        accepted = min(right, len(leaves[length % len(leaves)]), room - 1)
        expected.append(accepted)
        length += accepted + 1
    result = right_for(right).generate([[1, 4]], Settings(max_tokens=30))[0]
    assert result.token_ids == tuple(line(4, 30))
    counters = result.counters
    assert counters.rounds == len(expected)
    assert counters.accepted == sum(expected)
    assert counters.committed == sum(expected) + len(expected)
    assert list(counters.accept_histogram) == np.bincount(expected, minlength=FORK.depth + 1).tolist()


@pytest.mark.parametrize("cap", range(FORK.draft_length + 1))
def test_every_cut_leaves_the_text_as_it_is(cap):
    used = right_for(FORK.depth)
    greedy = Settings(max_tokens=14, draft_length=cap)
    seeded = Settings(max_tokens=14, draft_length=cap, temperature=1.1, seed=8)
    results = used.generate([[1, 4], [5], [3, 3]], [greedy, seeded, Settings(max_tokens=5, temperature=1.0)])
    assert results[0].token_ids == tuple(line(4, 14))
    alone = shared("plain").generate([[5]], Settings(max_tokens=14, temperature=1.1, seed=8))[0]
    assert results[1].token_ids == alone.token_ids
    assert all(r.counters.verified <= cap * r.counters.rounds for r in results[:2])


def test_nothing_proposed_is_plain_decoding():
    result = right_for(0, proposes=0).generate([[1]], Settings(max_tokens=9))[0]
    assert result.token_ids == tuple(line(1, 9))
    assert (result.counters.proposed, result.counters.rounds) == (0, 8)


def test_ngram_trees_give_the_same_text():
    first = shared("plain")
    drafter = ngram(draft_length=3, min_n=1, max_n=2, num_continuations=2)
    used = with_drafter(first, drafter)
    prompts = [[1, 2, 3, 1, 2, 4, 1, 2], [5, 6, 5, 7, 5]]
    for settings in (Settings(max_tokens=25), Settings(max_tokens=25, temperature=0.7, seed=3)):
        results = used.generate(prompts, settings)
        assert [r.token_ids for r in results] == [r.token_ids for r in first.generate(prompts, settings)]
        assert sum(r.counters.accepted for r in results) > 0
        assert max(len(r.counters.accept_histogram) for r in results) <= 4
    assert set(used.programs.traces.values()) == {1}


def test_block_verification_of_trees_is_refused():
    with pytest.raises(
        ValueError, match="block_verification: expected False with branches, which drafts trees"
    ):
        engine("fork", block_verification=True)
    assert DRAFTERS["fork"][0].draft_depth == 3
