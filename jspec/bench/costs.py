"""What a round costs by draft length, and so how much a drafter must get accepted."""

import dataclasses
from collections.abc import Callable, Sequence

from jspec.engine import Engine
from jspec.results import Counters
from jspec.settings import Settings
from jspec.timings import Timings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a decode round that verifies `draft_length` tokens, drafting itself not counted."""

    draft_length: int
    seconds: float
    relative: float  # to the plain round; also the mean commit length at which the round pays
    attainable: bool  # whether so many tokens can be committed at all


def round_costs(
    engine_for: Callable[[int], Engine],
    prompt: Sequence[int],
    draft_lengths: Sequence[int],
    *,
    rounds: int = 24,
) -> list[Cost]:
    """Times rounds of forced draft lengths on one prompt.

    Args:
      engine_for: makes an engine whose drafter always proposes that many tokens, none of them accepted.
      prompt: ids to start from.
      draft_lengths: ascending; 0 (plain) is measured first in any case.
      rounds: tokens decoded per run; the best mean of three runs counts.
    """
    costs: list[Cost] = []
    base = 0.0
    for draft_length in (0, *[d for d in draft_lengths if d > 0]):
        engine = engine_for(draft_length)
        settings = Settings(max_tokens=rounds, ignore_eos=True)
        engine.generate([prompt], settings)  # compile
        seconds = []
        for _ in range(3):
            timings = Timings()
            engine.generate([prompt], settings, timings=timings)
            seconds.append((timings.target + timings.settle) / max(timings.rounds, 1))
        best = min(seconds)
        base = base or best
        costs.append(
            Cost(
                draft_length=draft_length,
                seconds=best,
                relative=best / base,
                attainable=best / base < draft_length + 1 or draft_length == 0,
            )
        )
    return costs


def best_draft_length(costs: Sequence[Cost], counters: Counters) -> tuple[int, float]:
    """The draft length with the most expected tokens per second, and its gain over plain.

    What was committed by rounds that drafted is taken as the text on which the drafter has something
    to propose. Another draft length covers that text in more or fewer rounds, of another cost each;
    the rest of the text costs a plain round per token at any draft length.

    Args:
      costs: as measured, plain first.
      counters: of decoding with the drafter, at a draft length of at least those in question.
    """
    acceptance = counters.acceptance_by_position()
    drafting, plain_rounds = counters.drafting_rounds, counters.rounds - counters.drafting_rounds
    covered = drafting * (1 + sum(acceptance))  # tokens
    best = (0, 1.0)
    for cost in costs:
        if 0 < cost.draft_length <= len(acceptance):
            commit_length = 1 + sum(acceptance[: cost.draft_length])
            spent = plain_rounds + covered / commit_length * cost.relative  # in plain rounds
            best = max(best, (cost.draft_length, (plain_rounds + covered) / spent), key=lambda pair: pair[1])
    return best
