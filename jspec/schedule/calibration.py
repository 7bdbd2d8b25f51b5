"""Confidence that means what it says: fitted on rounds whose outcome is known.

A drafter's confidence at position j is read as its logit. Calibration scales it (and, in the likelihood
fit, shifts it), per position, so that the running product is the fraction that is accepted.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

GRID = np.logspace(-1, 1, 41).astype(np.float32)
NUM_BINS = 15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fitted:
    """Per position: probability = sigmoid(logit / temperature + offset)."""

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    ece_before: tuple[float, ...]  # of the survival, with the logits as they are
    ece_after: tuple[float, ...]

    def confidence(self, logits: np.ndarray) -> np.ndarray:
        """Calibrated probabilities, float64 [rounds, positions]."""
        return sigmoid(logits.astype(np.float64) / self.temperatures + np.asarray(self.offsets))


def sigmoid(logits: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow."""
    return np.exp(-np.logaddexp(0.0, -logits))


def expected_calibration_error(probs: np.ndarray, outcomes: np.ndarray, num_bins: int = NUM_BINS) -> float:
    """Mean gap between probability and frequency, over equal bins, weighted by how much falls into each.

    Args:
      probs: [n] in [0, 1].
      outcomes: [n], 0 or 1.
      num_bins: of equal width; 1 belongs to the last.

    Source: Guo et al., arXiv 1706.04599, section 2.
    """
    if not len(probs):
        return 0.0
    bins = np.minimum((probs * num_bins).astype(np.int64), num_bins - 1)
    gaps = np.zeros((num_bins,))
    np.add.at(gaps, bins, probs - outcomes)
    return float(np.abs(gaps).sum() / len(probs))


def prefix_outcomes(accept_lengths: np.ndarray, draft_length: int) -> np.ndarray:
    """1 where the draft token and all before it were accepted: float64 [rounds, positions]."""
    return (np.arange(draft_length) < np.asarray(accept_lengths)[:, None]).astype(np.float64)


def fit_grid(
    logits: np.ndarray, outcomes: np.ndarray, *, grid: np.ndarray = GRID, num_bins: int = NUM_BINS
) -> Fitted:
    """Sequential temperature scaling: position by position, the temperature of least calibration error.

    The error is that of the survival, with the positions before as already fitted. Of equal errors the
    first temperature of the grid wins.

    Args:
      logits: of the confidence, [rounds, positions].
      outcomes: from `prefix_outcomes`.
      grid: temperatures to try, in this order.
      num_bins: of the calibration error.

    Source: DSpark (arXiv 2607.05147), section 3.2.3; SGLang 0.5.23 `dspark_sts_fit`.
    """
    logits, outcomes = _checked(logits, outcomes)
    before = np.ones((len(logits),))
    raw = np.ones((len(logits),))
    temperatures, ece_before, ece_after = [], [], []
    for position in range(logits.shape[1]):
        column, wanted = logits[:, position], outcomes[:, position]
        raw = raw * sigmoid(column)
        ece_before.append(expected_calibration_error(raw, wanted, num_bins))
        errors = [
            expected_calibration_error(before * sigmoid(column / float(t)), wanted, num_bins) for t in grid
        ]
        best = int(np.argmin(errors))
        before = before * sigmoid(column / float(grid[best]))
        temperatures.append(float(grid[best]))
        ece_after.append(errors[best])
    return Fitted(
        temperatures=tuple(temperatures),
        offsets=(0.0,) * len(temperatures),
        ece_before=tuple(ece_before),
        ece_after=tuple(ece_after),
    )


def fit_likelihood(logits: np.ndarray, outcomes: np.ndarray, *, prior: float = 1.0) -> Fitted:
    """A scale and a shift per position, of greatest likelihood among the rounds that got there.

    The confidence at a position is conditional, so only rounds whose earlier draft tokens were accepted
    say anything about it. Smooth, so small samples move it little; `prior` pulls it to what is given.

    Args:
      logits: of the confidence, [rounds, positions].
      outcomes: from `prefix_outcomes`.
      prior: strength of the pull towards scale 1 and shift 0, in squared units of each.

    Source: Platt scaling with a Gaussian prior, by Newton steps; the conditioning is ours.
    """
    logits, outcomes = _checked(logits, outcomes)
    reached = np.concatenate([np.ones((len(logits), 1)), outcomes[:, :-1]], axis=1) > 0
    pairs = [
        _newton(logits[reached[:, j], j], outcomes[reached[:, j], j], prior) for j in range(logits.shape[1])
    ]
    fitted = Fitted(
        temperatures=tuple(1 / scale for scale, _ in pairs),
        offsets=tuple(shift for _, shift in pairs),
        ece_before=(),
        ece_after=(),
    )

    def errors(probs: np.ndarray) -> tuple[float, ...]:
        running = np.cumprod(probs, axis=1)
        return tuple(expected_calibration_error(running[:, j], outcomes[:, j]) for j in range(len(pairs)))

    return dataclasses.replace(
        fitted, ece_before=errors(sigmoid(logits)), ece_after=errors(fitted.confidence(logits))
    )


def _newton(logits: np.ndarray, outcomes: np.ndarray, prior: float) -> tuple[float, float]:
    """Scale (kept positive through its logarithm) and shift of one position."""
    log_scale, shift = 0.0, 0.0

    def loss(log_scale: float, shift: float) -> float:
        z = np.exp(log_scale) * logits + shift
        return float(np.sum(np.logaddexp(0.0, z) - outcomes * z) + 0.5 * prior * (log_scale**2 + shift**2))

    for _ in range(50):
        scaled = np.exp(log_scale) * logits
        probs = sigmoid(scaled + shift)
        gap, weight = probs - outcomes, probs * (1 - probs)
        gradient = np.array([gap @ scaled + prior * log_scale, gap.sum() + prior * shift])
        cross = weight @ scaled
        hessian = np.array([[weight @ scaled**2 + prior, cross], [cross, weight.sum() + prior]])
        step = np.linalg.solve(hessian, gradient)
        size = 1.0
        while size > 1e-6 and loss(log_scale - size * step[0], shift - size * step[1]) > loss(
            log_scale, shift
        ):
            size /= 2
        log_scale, shift = log_scale - size * step[0], shift - size * step[1]
        if np.abs(size * step).max() < 1e-9:
            break
    return float(np.exp(log_scale)), float(shift)


def _checked(logits: np.ndarray, outcomes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logits, outcomes = np.asarray(logits, np.float64), np.asarray(outcomes, np.float64)
    if logits.ndim != 2 or logits.shape != outcomes.shape or not len(logits):
        raise ValueError(
            f"logits: expected [rounds, positions] like the outcomes, got {logits.shape} and {outcomes.shape}; "
            "record at least one round"
        )
    if not np.isfinite(logits).all():
        raise ValueError(
            "logits: expected finite numbers, got NaN or infinity; look at the drafter's confidence"
        )
    return logits, outcomes


def reliability(
    probs: np.ndarray, outcomes: np.ndarray, num_bins: int = NUM_BINS
) -> Sequence[tuple[float, float, int]]:
    """Per bin that holds something: mean probability, frequency, and how many; what a plot shows."""
    bins = np.minimum((probs * num_bins).astype(np.int64), num_bins - 1)
    return [
        (float(probs[bins == b].mean()), float(outcomes[bins == b].mean()), int((bins == b).sum()))
        for b in range(num_bins)
        if (bins == b).any()
    ]
