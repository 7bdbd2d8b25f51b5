"""Acceptance by decoding: what a drafter is worth, per task and per position."""

import dataclasses
from collections.abc import Mapping, Sequence

from jspec.engine import Engine
from jspec.results import Counters, add
from jspec.settings import Settings
from jspec_train.sample import Sample


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutPrompt:
    """A prompt that was not trained on."""

    ids: tuple[int, ...]
    task: str


def prompts_of(samples: Sequence[Sample]) -> list[HeldOutPrompt]:
    """The text before the first supervised token of each sample."""
    prompts = []
    for sample in samples:
        first = int(sample.loss_mask.argmax())
        if first:
            prompts.append(HeldOutPrompt(ids=tuple(int(i) for i in sample.ids[:first]), task=sample.task))
    return prompts


def spread(count: int, wanted: int) -> list[int]:
    """Indices of `wanted` of `count` samples, or of all, evenly over them: files are often sorted by task."""
    wanted = min(count, wanted)
    return [i * count // wanted for i in range(wanted)]


def decode_held_out(
    engine: Engine, prompts: Sequence[HeldOutPrompt], max_tokens: int
) -> Mapping[str, Counters]:
    """Counters of greedy decoding, per task; "all" is the sum.

    Raises:
      ValueError: there is no prompt.
    """
    if not prompts:
        raise ValueError("prompts: expected at least one held-out prompt, got none; give validation data")
    results = engine.generate([list(p.ids) for p in prompts], Settings(max_tokens=max_tokens))
    by_task: dict[str, list[Counters]] = {}
    for prompt, result in zip(prompts, results, strict=True):
        by_task.setdefault(prompt.task or "untitled", []).append(result.counters)
    totals = {task: add(counters) for task, counters in sorted(by_task.items())}
    return totals | {"all": add(list(totals.values()))}
