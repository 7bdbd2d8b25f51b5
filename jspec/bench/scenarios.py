"""Work on which speculation may not pay: short answers, many requests, long context, every sampling setting.

Source: the counterexamples of the article behind this project, section 9.4. That of large vocabularies needs
models of other sizes; see `jspec.bench.vocabularies`.
"""

import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from jspec.bench.prompts import PROMPTS, asked
from jspec.engine import Engine
from jspec.prompts import Prompt
from jspec.results import Result, add
from jspec.settings import Settings

ANSWERS = (4, 16, 64)  # tokens
LOADS = (1, 2, 4, 8)  # requests together
CONTEXTS = (64, 512, 2048)  # tokens of the prompt
EVERY_SETTING = {
    "temperature": 0.8,
    "top_k": 50,
    "top_p": 0.95,
    "min_p": 0.02,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.2,
    "frequency_penalty": 0.2,
    "logit_bias": {0: -5.0},
    "min_tokens": 4,
    "log_probs": 5,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Requests that are decoded together, at one point of a scenario."""

    scenario: str
    name: str
    prompts: Sequence[Prompt]
    settings: Settings
    together: int  # of the prompts, at a time


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """One variant on one case: medians over the repeats."""

    scenario: str
    case: str
    variant: str
    tokens_per_second: float  # prompts included
    ratio: float  # to plain decoding, median of the ratios of each repeat
    first_token_seconds: float  # from the request to its first token; the mean of the requests
    decode_ratio: float | None  # of the time after first tokens; None = none follows, or they run together
    mean_commit_length: float | None
    identical: bool | None  # tokens equal to plain's; None for plain itself


@dataclasses.dataclass(frozen=True, kw_only=True)
class Passage:
    """A case, once through."""

    seconds: float
    first_seconds: float
    results: tuple[Result, ...]

    @property
    def tokens(self) -> int:
        """Emitted by all of its requests."""
        return sum(len(result.token_ids) for result in self.results)


def short_answers(engine: Engine, max_tokens: int) -> list[Case]:
    """Prompt and first token weigh most in an answer that ends soon."""
    prompts = [asked(text) for text in PROMPTS["chat"]]
    return [
        Case(
            scenario="short",
            name=f"{count} tokens",
            prompts=prompts,
            settings=Settings(max_tokens=count, ignore_eos=True),
            together=1,
        )
        for count in ANSWERS
    ]


def rising_load(engine: Engine, max_tokens: int) -> list[Case]:
    """The more requests share a round, the more a draft token costs that is rejected."""
    texts = [text for group in zip(*PROMPTS.values(), strict=False) for text in group]
    return [
        Case(
            scenario="load",
            name=f"{count} together",
            prompts=[asked(text) for text in itertools.islice(itertools.cycle(texts), max(count, 4))],
            settings=Settings(max_tokens=max_tokens, ignore_eos=True),
            together=count,
        )
        for count in LOADS
        if count <= engine.max_slots
    ]


def long_context(engine: Engine, max_tokens: int) -> list[Case]:
    """Attention of target and drafter reads all of it; contexts that the engine has no room for are left out.

    Raises:
      ValueError: there is no room for any.
    """
    if CONTEXTS[0] + max_tokens > engine.max_context:
        raise ValueError(
            f"max_tokens: expected at most {engine.max_context - CONTEXTS[0]} behind {CONTEXTS[0]} tokens of context, "
            f"got {max_tokens}; lower it, or leave the scenario out"
        )
    assert engine.tokenizer is not None
    ids = engine.tokenizer.encode(" ".join(text for group in PROMPTS.values() for text in group))
    return [
        Case(
            scenario="context",
            name=f"{length} tokens before",
            prompts=[list(itertools.islice(itertools.cycle(ids), length))],
            settings=Settings(max_tokens=max_tokens, ignore_eos=True),
            together=1,
        )
        for length in CONTEXTS
        if length + max_tokens <= engine.max_context
    ]


def every_setting(engine: Engine, max_tokens: int) -> list[Case]:
    """Whatever the settings, the answer must be plain decoding's with that seed; they take their time."""
    settings = {
        "greedy": Settings(max_tokens=max_tokens),
        "temperature 1": Settings(max_tokens=max_tokens, temperature=1.0, seed=1),
        "every setting": Settings(max_tokens=max_tokens, seed=1, **EVERY_SETTING),
    }
    prompts = [asked(text) for text in PROMPTS["rewrite"]]
    return [
        Case(scenario="sampling", name=name, prompts=prompts, settings=one, together=1)
        for name, one in settings.items()
    ]


SCENARIOS: Mapping[str, Callable[[Engine, int], list[Case]]] = {
    "short": short_answers,
    "load": rising_load,
    "context": long_context,
    "sampling": every_setting,
}


def passage(engine: Engine, case: Case) -> Passage:
    """Decodes a case, as many requests at a time as it says."""
    seconds, firsts, results = 0.0, [], []
    for start in range(0, len(case.prompts), case.together):
        with engine.session() as session:
            began = time.perf_counter()
            indices = session.add(list(case.prompts[start : start + case.together]), case.settings)
            seen: set[int] = set()
            while session.busy:
                pieces = session.step()
                now = time.perf_counter() - began
                for piece in pieces:
                    if piece.index not in seen:
                        seen.add(piece.index)
                        firsts.append(now)
            seconds += time.perf_counter() - began
            results += [session.result(index) for index in indices]
    return Passage(seconds=seconds, first_seconds=statistics.mean(firsts), results=tuple(results))


def run(
    engines: Mapping[str, Engine],
    cases: Sequence[Case],
    *,
    repeats: int,
    progress: Callable[[str], None] = lambda _: None,
) -> list[Outcome]:
    """Measures every engine on every case; the first engine is plain decoding.

    Each repeat runs all engines before the next one starts, so that a slow spell of the machine falls on all.

    Args:
      engines: by name, without prefix caches: a case is repeated only to measure it again.
      cases: of one scenario or several.
      repeats: at least 1.
      progress: told what happens.
    """
    outcomes = []
    base = next(iter(engines))
    for case in cases:
        progress(f"{case.scenario}, {case.name}: compiling")
        for engine in engines.values():
            passage(engine, case)
        passages: dict[str, list[Passage]] = {name: [] for name in engines}
        for repeat in range(repeats):
            for name, engine in engines.items():
                progress(f"{case.scenario}, {case.name}: {name}, repeat {repeat + 1} of {repeats}")
                passages[name].append(passage(engine, case))
        outcomes += [
            _outcome(case, name, found, passages[base], name == base) for name, found in passages.items()
        ]
    return outcomes


def _outcome(
    case: Case, name: str, found: Sequence[Passage], base: Sequence[Passage], is_base: bool
) -> Outcome:
    speeds = [one.tokens / one.seconds for one in found]
    base_speeds = [one.tokens / one.seconds for one in base]
    # Requests that run together have their prompts executed in turn, and decode only after the last of them.
    has_later = case.together == 1 and all(one.tokens > len(one.results) for one in base)
    later = [_after_first(a) / _after_first(b) for a, b in zip(found, base, strict=True) if has_later]
    counters = add([result.counters for result in found[0].results])
    return Outcome(
        scenario=case.scenario,
        case=case.name,
        variant=name,
        tokens_per_second=statistics.median(speeds),
        ratio=statistics.median(a / b for a, b in zip(speeds, base_speeds, strict=True)),
        first_token_seconds=statistics.median(one.first_seconds for one in found),
        decode_ratio=statistics.median(later) if later else None,
        mean_commit_length=counters.mean_commit_length,
        identical=None
        if is_base
        else [r.token_ids for r in found[0].results] == [r.token_ids for r in base[0].results],
    )


def _after_first(one: Passage) -> float:
    """Tokens per second after each request's first token."""
    return (one.tokens - len(one.results)) / (one.seconds - one.first_seconds * len(one.results))


def verdict(outcomes: Sequence[Outcome]) -> str:
    """Where speculation pays in one scenario, and where it does not."""
    best: dict[str, Outcome] = {}
    for one in outcomes:
        if one.identical is not None and (one.case not in best or one.ratio > best[one.case].ratio):
            best[one.case] = one
    losses = [f"{one.case} ({one.ratio:.2f}x of plain)" for one in best.values() if one.ratio < 1]
    gains = [f"{one.case} ({one.ratio:.2f}x)" for one in best.values() if one.ratio >= 1]
    scenario = outcomes[0].scenario
    if not losses:
        return f"{scenario}: speculation pays at {', '.join(gains)}"
    rest = f"; it pays at {', '.join(gains)}" if gains else ""
    return f"{scenario}: speculation does not pay at {', '.join(losses)}{rest}"
