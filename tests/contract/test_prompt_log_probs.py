"""Log-probabilities of prompts, read off their chunks."""

import numpy as np
import pytest
from contract.engines import TABLE, shared

from jspec.settings import Settings

SCORED = Settings(max_tokens=3, log_probs=2, prompt_log_probs=True)
PROMPT = [1, 5, 2, 7, 0, 3, 3, 6, 4, 1, 2, 2, 5, 7, 6, 0, 1, 3, 4, 6, 2, 5]  # three chunks, five pages


def log_softmax(logits: np.ndarray) -> np.ndarray:
    return logits - np.log(np.sum(np.exp(logits), axis=-1, keepdims=True))


LOG_PROBS = log_softmax(TABLE.astype(np.float64))


def check(result, prompt):
    rows = result.prompt_log_probs
    assert [row.token_id for row in rows] == list(prompt[1:])
    for before, row in zip(prompt, rows, strict=False):
        assert row.log_prob == pytest.approx(LOG_PROBS[before, row.token_id], abs=1e-5)
        best = np.argsort(-LOG_PROBS[before])[:2]
        assert [id_ for id_, _ in row.top] == best.tolist()
        assert [value for _, value in row.top] == pytest.approx(LOG_PROBS[before, best], abs=1e-5)


@pytest.fixture(scope="module")
def engine():
    return shared("oracle")


def test_every_token_of_a_prompt_has_the_models_log_probability(engine):
    for length in (1, 2, 3, 4, 5, 8, 9, len(PROMPT)):
        (result,) = engine.generate([PROMPT[:length]], SCORED)
        check(result, PROMPT[:length])


def test_prompts_of_one_batch_have_each_their_own(engine):
    prompts = [PROMPT, PROMPT[::-1], PROMPT[3:9], PROMPT[7:]]
    for result, prompt in zip(engine.generate(prompts, SCORED), prompts, strict=True):
        check(result, prompt)


def test_a_prompt_that_the_prefix_cache_has_is_executed_again(engine):
    engine.generate([PROMPT], Settings(max_tokens=3))
    assert engine.prefix_cache
    first, second = engine.generate([PROMPT, PROMPT], [SCORED, Settings(max_tokens=3)])
    check(first, PROMPT)
    assert first.counters.reused == 0
    assert second.counters.reused > 0
    assert second.prompt_log_probs is None
    assert first.text == second.text


def test_settings_do_not_act_on_them(engine):
    one = Settings(max_tokens=3, log_probs=2, prompt_log_probs=True, temperature=0.5, seed=1, top_k=1)
    (result,) = engine.generate([PROMPT], one)
    check(result, PROMPT)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_they_outlast_a_preemption(engine, rounds):
    with engine.session() as session:
        (index,) = session.add([PROMPT], SCORED)
        first = None
        for _ in range(rounds):
            for piece in session.step():
                first = first or piece
        if session.busy:
            session.preempt(index)
        while session.busy:
            for piece in session.step():
                first = first or piece
        check(session.result(index), PROMPT)
        assert first.prompt_log_probs == session.result(index).prompt_log_probs


def test_they_come_with_the_first_piece_alone(engine):
    pieces = list(engine.stream([PROMPT], SCORED))
    assert [piece.prompt_log_probs is not None for piece in pieces] == [True] + [False] * (len(pieces) - 1)


def test_they_need_log_probs():
    with pytest.raises(ValueError, match="prompt_log_probs: expected True or False, and log_probs with True"):
        Settings(prompt_log_probs=True)
