"""Step 10: real decoding accepts what the texts let expect, and changes nothing in the output."""

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.decode import Method, Models
from jspec.drafters.plain import plain
from jspec.drafters.protocol import Drafter
from jspec.engine import Engine
from jspec.results import Result, add
from jspec.settings import Settings
from jspec_train.check.finding import Finding, failed, not_checkable, passed
from jspec_train.check.subject import Subject
from jspec_train.decoding import HeldOutPrompt

DECODED = 10
_SAME = 0.1  # relative: of decoding against the same text taken step by step
_SHORT = 0.75  # decoding below this share of the data's figure is another distribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class Answers:
    """What the target says to the prompts, with the drafter and without."""

    drafted: Sequence[Result]
    plain: Sequence[Result]
    max_tokens: int


def answer(subject: Subject, prompts: Sequence[HeldOutPrompt], max_tokens: int, dtype: DTypeLike) -> Answers:
    """Decodes greedily, twice."""
    assert subject.drafter is not None
    loaded = subject.loaded
    longest = max(len(prompt.ids) for prompt in prompts) + max_tokens

    def results(drafter: Drafter, params: object) -> Sequence[Result]:
        engine = Engine(
            method=Method(target=loaded.target, drafter=drafter),
            models=Models(target=loaded.params, drafter=params),
            tokenizer=subject.tokenizer,
            eos_ids=loaded.eos_ids or subject.tokenizer.eos_ids,
            max_slots=1,  # each number of lanes is a program more to compile
            max_context=min(-(-longest // 128) * 128, loaded.target.max_context),
            cache_dtype=jnp.dtype(dtype),
        )
        return engine.generate([list(prompt.ids) for prompt in prompts], Settings(max_tokens=max_tokens))

    return Answers(
        drafted=results(subject.drafter.drafter, subject.drafter.params),
        plain=results(plain(), ()),
        max_tokens=max_tokens,
    )


def commit_length(lengths: Sequence[np.ndarray], draft_length: int, count: int) -> float | None:
    """Mean tokens per round of greedy decoding along known answers.

    Args:
      lengths: accept length at each token of each answer but the last.
      draft_length: of the drafter.
      count: tokens that the request may emit: drafting shortens in front of the end.
    """
    rounds = committed = 0
    for row in lengths:
        place = 0
        while place < len(row):
            room = min(draft_length, count - place - 2)
            step = 1 + min(int(row[place]), max(room, 0), len(row) - place - 1)
            rounds, committed, place = rounds + 1, committed + step, place + step
    return committed / rounds if rounds else None


def decoded_step(
    answers: Answers,
    *,
    exact: bool,
    along_answers: float | None,
    along_data: float | None,
) -> Finding:
    """Compares.

    Args:
      answers: of both engines.
      exact: whether the target computes in float32, where outputs have to be equal token by token.
      along_answers: what the training code expects on the target's own answers.
      along_data: the same on the answers in the data.
    """
    decoded = add([result.counters for result in answers.drafted]).mean_commit_length
    if decoded is None:
        return not_checkable(DECODED, "every answer ended with its first token")
    differing = [
        i
        for i, (a, b) in enumerate(zip(answers.drafted, answers.plain, strict=True))
        if a.token_ids != b.token_ids
    ]
    figures = {
        "mean_commit_length": decoded,
        "expected_on_answers": along_answers,
        "expected_on_data": along_data,
        "outputs_that_differ": len(differing),
    }
    said = f"{decoded:.2f} tokens a round"
    if along_answers is not None:
        said += f", {along_answers:.2f} expected of these answers"
    if along_data is not None:
        said += f", {along_data:.2f} of those in the data"
    count = len(answers.drafted)
    said += f"; {count - len(differing)} of {count} outputs equal plain decoding"
    if differing and exact:
        said += f"; prompt {differing[0] + 1} does not: the commit of accepted tokens is wrong"
        return failed(DECODED, said, **figures)
    if along_answers is not None and abs(decoded - along_answers) > _SAME * along_answers:
        return failed(DECODED, f"{said}; decoding does not do what was trained", **figures)
    if along_data is not None and decoded < _SHORT * along_data:
        said += "; the answers in the data are not what the target says: regenerate them with the target"
        return failed(DECODED, said, **figures)
    return passed(DECODED, said, **figures)
