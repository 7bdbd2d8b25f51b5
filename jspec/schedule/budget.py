"""How many draft tokens a round should verify: the host's half of the schedule."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jspec.schedule.allotment import LEAST_SURVIVAL


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    """A budget and what is expected of it."""

    budget: int
    tokens: float  # emitted by the round, over all lanes
    tokens_per_second: float


def best_budget(
    survival: np.ndarray,
    tokens_per_second: Callable[[np.ndarray, np.ndarray], np.ndarray],
    *,
    candidates: Sequence[int] | None = None,
    epsilon: float = LEAST_SURVIVAL,
) -> Choice:
    """The budget that maximises the expected tokens per second; the smallest one on ties.

    With budget K the draft tokens of highest survival are verified, so a round emits one bonus per
    lane and the K largest survivals; over several samples of what the survival may be, their mean.

    Args:
      survival: float [lanes, drafts] as best known, or [samples, lanes, drafts]; lanes with a request only.
      tokens_per_second: of (expected tokens float64 [n], budgets int64 [n]).
      candidates: budgets to choose from, ascending; None = all that draft tokens can fill.
      epsilon: draft tokens of less survival do not count.

    Source: DSpark (arXiv 2607.05147), section 3.2.1; SGLang 0.5.23 `compute_verify_token_budget`.
    """
    lanes, drafts = survival.shape[-2:]
    samples = survival.reshape(-1, lanes * drafts)
    kept = np.where(samples >= epsilon, samples, 0)
    kept.sort(axis=1)
    most = int(np.max(np.sum(samples >= epsilon, axis=1), initial=0))
    gains = np.mean(kept[:, ::-1], axis=0, dtype=np.float64)
    expected = lanes + np.concatenate([[0.0], np.cumsum(gains)])
    budgets = np.arange(most + 1) if candidates is None else np.asarray(candidates)
    tokens = expected[np.minimum(budgets, most)]
    speeds = tokens_per_second(tokens, budgets)
    best = int(np.argmax(speeds))
    return Choice(
        budget=int(budgets[best]), tokens=float(tokens[best]), tokens_per_second=float(speeds[best])
    )
