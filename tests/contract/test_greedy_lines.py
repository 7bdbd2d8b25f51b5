"""Greedy decoding gives plain decoding's tokens, whatever the drafter does."""

import pytest
from contract.engines import DRAFTERS, TABLE, M, engine, shared

from jspec.settings import Settings

SPECULATIVE = [name for name in DRAFTERS if name != "plain"]
PROMPTS = [[1, 2, 3], [4], [5, 5, 5, 5, 5, 5, 5, 5, 5], [7, 0]]


def line(token: int, count: int) -> list[int]:
    """The table's own greedy line, without any of the code under test."""
    tokens = []
    for _ in range(count):
        token = int(TABLE[token].argmax())
        tokens.append(token)
    return tokens


def tokens(drafter: str, prompts, settings) -> list[tuple[int, ...]]:
    return [result.token_ids for result in shared(drafter).generate(prompts, settings)]


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_is_the_targets_line(drafter):
    expected = [tuple(line(prompt[-1], 13)) for prompt in PROMPTS]
    assert tokens(drafter, PROMPTS, Settings(max_tokens=13)) == expected


@pytest.mark.parametrize("drafter", SPECULATIVE)
@pytest.mark.parametrize(
    "settings",
    [
        Settings(max_tokens=11, frequency_penalty=1.5),
        Settings(max_tokens=11, repetition_penalty=1.7, presence_penalty=0.4),
        Settings(max_tokens=11, logit_bias={3: -float("inf"), 5: 2.0}),
        Settings(max_tokens=11, allowed_token_ids=(0, 2, 4, 6)),
        Settings(max_tokens=11, stop_token_ids=(6,), min_tokens=5),
        Settings(max_tokens=11, draft_length=1),
        Settings(max_tokens=1),
        Settings(max_tokens=2),
    ],
    ids=["frequency", "repetition", "bias", "allowed", "min tokens", "cap", "one token", "two tokens"],
)
def test_greedy_with_settings_equals_plain(drafter, settings):
    assert tokens(drafter, PROMPTS, settings) == tokens("plain", PROMPTS, settings)


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_request_beside_sampled_ones_keeps_its_line(drafter):
    warm = Settings(max_tokens=9, temperature=1.3, top_k=4)
    mixed = [Settings(max_tokens=9), warm, Settings(max_tokens=9), warm]
    results = tokens(drafter, PROMPTS, mixed)
    for index in (0, 2):
        assert results[index] == tuple(line(PROMPTS[index][-1], 9))


@pytest.mark.parametrize(("drafter", "accepted"), [("anti", 0), ("cut1", 1), ("cut2", 2), ("oracle", M)])
def test_counters_say_what_was_accepted(drafter, accepted):
    result = shared(drafter).generate([[1]], Settings(max_tokens=1 + 2 * (accepted + 1)))[0]
    counters = result.counters
    assert counters.rounds == 2
    assert counters.accepted == 2 * accepted
    assert counters.committed == 2 * (accepted + 1)
    assert counters.emitted == 1 + 2 * (accepted + 1)
    assert counters.mean_commit_length == accepted + 1
    assert counters.accept_histogram[accepted] == 2


def test_single_wrong_draft_token_is_refused():
    result = shared("anti").generate([[1]], Settings(max_tokens=8, draft_length=1))[0]
    assert result.counters.accepted == 0
    assert result.counters.verified == result.counters.rounds - 1  # the last round has no room to draft
    assert result.token_ids == tuple(line(1, 8))


def test_speculation_off_for_one_request_leaves_its_neighbour_on():
    off, on = shared("oracle").generate(
        [[1], [2]], [Settings(max_tokens=8, draft_length=0), Settings(max_tokens=8)]
    )
    assert (off.counters.proposed, off.counters.rounds) == (0, 7)
    assert on.counters.accepted > 0
    assert off.token_ids == tuple(line(1, 8))


def test_ties_go_to_the_lowest_id_with_every_drafter():
    tied = TABLE.copy()
    tied[:, 3] = tied[:, 6] = 9.0
    for drafter in ("plain", "oracle", "ngram"):
        result = engine(drafter, tied).generate([[1]], Settings(max_tokens=5))[0]
        assert result.token_ids == (3,) * 5


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_each_bucket_is_traced_once(drafter):
    used = shared(drafter)
    before = used.programs.traces.copy()  # of programs that may have been let go since, see conftest.py
    for settings in (Settings(max_tokens=7), Settings(max_tokens=7, temperature=1.0, top_p=0.9, seed=1)):
        used.generate(PROMPTS, settings)
    assert used.programs.traces
    assert set((used.programs.traces - before).values()) <= {1}
