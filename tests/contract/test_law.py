"""Sampled decoding has the target's law: the joint law of three tokens, by chi-square with fixed seeds.

The expected probabilities are computed here in numpy, without the code under test.
"""

import itertools

import numpy as np
import pytest
from contract.chi_square import z_score
from contract.engines import DRAFTERS, TABLE, VOCABULARY, engine, shared

from jspec.settings import Settings

TOKENS = 3
REQUESTS = 4096
PROMPT = [1, 4, 2, 4, 2]


def next_probs(last: int, text: list[int], settings: Settings) -> np.ndarray:
    """The target's distribution after a text, from the definition of each setting."""
    logits = TABLE[last].astype(np.float64)
    output = text[len(PROMPT) :]
    for id_ in set(text):
        logits[id_] = (
            logits[id_] / settings.repetition_penalty
            if logits[id_] > 0
            else logits[id_] * settings.repetition_penalty
        )
    for id_ in range(VOCABULARY):
        logits[id_] -= settings.frequency_penalty * output.count(id_)
        logits[id_] -= settings.presence_penalty * (id_ in output)
        logits[id_] += settings.logit_bias.get(id_, 0.0)
        if settings.allowed_token_ids is not None and id_ not in settings.allowed_token_ids:
            logits[id_] = -np.inf
    logits = logits / settings.temperature
    probs = np.exp(logits - logits.max())
    probs /= probs.sum()
    order = np.argsort(-probs)
    if settings.top_k is not None:
        probs[order[settings.top_k :]] = 0
        probs /= probs.sum()
    if settings.top_p < 1:
        before = np.cumsum(probs[order]) - probs[order]
        probs[order[before >= settings.top_p]] = 0
        probs /= probs.sum()
    probs[probs < settings.min_p * probs.max()] = 0
    return probs / probs.sum()


def joint(settings: Settings) -> dict[tuple[int, ...], float]:
    law = {}
    for tokens in itertools.product(range(VOCABULARY), repeat=TOKENS):
        text, probability = list(PROMPT), 1.0
        for token in tokens:
            probability *= next_probs(text[-1], text, settings)[token]
            text.append(token)
        if probability > 0:
            law[tokens] = probability
    return law


def sampled_counts(decoder, settings: Settings) -> dict[tuple[int, ...], int]:
    counts: dict[tuple[int, ...], int] = {}
    for result in decoder.generate([PROMPT] * REQUESTS, settings):
        counts[result.token_ids] = counts.get(result.token_ids, 0) + 1
    return counts


def wide(drafter: str, **options):
    return shared(drafter, max_slots=64, **options)


SETTINGS = {
    "temperature": Settings(max_tokens=TOKENS, temperature=1.0),
    "filters": Settings(max_tokens=TOKENS, temperature=1.4, top_k=6, top_p=0.9, min_p=0.05),
    "penalties": Settings(
        max_tokens=TOKENS,
        temperature=0.8,
        repetition_penalty=1.4,
        frequency_penalty=0.6,
        presence_penalty=0.3,
    ),
    "bias": Settings(
        max_tokens=TOKENS, temperature=1.0, logit_bias={2: 1.5}, allowed_token_ids=(0, 2, 3, 5, 7)
    ),
}


# Drafters that propose the greedy line, right or wrong, differ in nothing that the other settings touch; of
# the draws and q of the drafters with a network, only the temperature decides; of a tree, only its paths
# matter to penalties. What EAGLE-3 drafts in a chain is deterministic too, and its tree is here.
CASES = [
    (d, s)
    for d in DRAFTERS
    for s in SETTINGS
    if (s == "temperature" and d != "eagle3")
    or (d in ("dflash2", "dspark") and s == "filters")
    or (d == "tree" and s == "penalties")
    or d not in ("cut1", "cut2", "anti", "dflash2", "dspark", "fork", "tree", "eagle3", "eagle3-tree")
] + [("domino", "temperature")]
# What `make test` has of them: kinds of q and settings that differ most.
QUICK = {
    ("ngram", "filters"),
    ("dense", "penalties"),
    ("sparse", "filters"),
    ("varying", "bias"),
}


@pytest.mark.parametrize(
    ("drafter", "name"),
    [case if case in QUICK else pytest.param(*case, marks=pytest.mark.extended) for case in CASES],
)
def test_joint_law_of_three_tokens(drafter, name):
    settings = SETTINGS[name]
    counts = sampled_counts(wide(drafter), settings)
    assert abs(z_score(counts, joint(settings), REQUESTS)) < 4


@pytest.mark.parametrize(
    "drafter",
    [
        pytest.param("dense", marks=pytest.mark.extended),
        pytest.param("oracle", marks=pytest.mark.extended),
        "dflash2",
        "dspark",
    ],
)
def test_joint_law_under_block_verification(drafter):
    counts = sampled_counts(wide(drafter, block_verification=True), SETTINGS["temperature"])
    assert abs(z_score(counts, joint(SETTINGS["temperature"]), REQUESTS)) < 4


def test_the_test_sees_a_wrong_law():
    right = joint(SETTINGS["temperature"])
    counts = sampled_counts(wide("plain"), Settings(max_tokens=TOKENS, temperature=0.8))
    assert z_score(counts, right, REQUESTS) > 4


def test_the_test_sees_a_q_that_tokens_were_not_drawn_from():
    counts = sampled_counts(wide("wrong row"), SETTINGS["temperature"])
    assert z_score(counts, joint(SETTINGS["temperature"]), REQUESTS) > 4


@pytest.mark.extended
def test_greedy_and_seeded_requests_beside_sampled_ones_change_nothing():
    sampled, greedy = SETTINGS["temperature"], Settings(max_tokens=TOKENS)
    seeded = Settings(max_tokens=TOKENS, temperature=1.0, seed=9)
    results = wide("dspark").generate([PROMPT] * (3 * 1024), [sampled, greedy, seeded] * 1024)
    plain = [shared("plain").generate([PROMPT], s)[0].token_ids for s in (greedy, seeded)]
    for kind, expected in enumerate(plain):
        assert {result.token_ids for result in results[kind + 1 :: 3]} == {expected}
    counts: dict[tuple[int, ...], int] = {}
    for result in results[::3]:
        counts[result.token_ids] = counts.get(result.token_ids, 0) + 1
    assert abs(z_score(counts, joint(sampled), 1024)) < 4


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_seeded_request_equals_plain_alone_and_in_a_batch(drafter):
    seeded = Settings(max_tokens=12, temperature=1.2, top_p=0.95, seed=77)
    alone = shared("plain").generate([PROMPT], seeded)[0].token_ids
    other = Settings(max_tokens=9, temperature=0.9, seed=5)
    batch = shared(drafter).generate([[3], PROMPT, [6, 6]], [other, seeded, Settings(max_tokens=12)])
    assert shared(drafter).generate([PROMPT], seeded)[0].token_ids == alone
    assert batch[1].token_ids == alone


def test_unseeded_requests_do_not_share_a_stream():
    results = engine("dense", max_slots=8).generate([PROMPT] * 8, Settings(max_tokens=12, temperature=1.5))
    assert len({result.token_ids for result in results}) > 4
