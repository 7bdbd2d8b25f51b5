"""What would be accepted where, request by request: recorded from real rounds, or made up."""

import dataclasses
import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trace:
    """What would happen to one request at each of its positions, if a round began there.

    Raises:
      ValueError: no position, other shapes, confidence that is no probability, impossible accept lengths.
    """

    confidence: np.ndarray  # float [positions, drafts], calibrated
    accept_lengths: np.ndarray  # int [positions]: draft tokens that would be accepted if all were verified

    def __post_init__(self) -> None:
        shape = self.confidence.shape
        if len(shape) != 2 or not shape[0] or self.accept_lengths.shape != shape[:1]:
            raise ValueError(
                f"trace: expected confidence [positions, drafts] and one accept length per position, got {shape} "
                f"and {self.accept_lengths.shape}; record again"
            )
        if not ((self.confidence >= 0) & (self.confidence <= 1)).all():
            raise ValueError("confidence: expected numbers in [0, 1], got others in a trace; record again")
        if not ((self.accept_lengths >= 0) & (self.accept_lengths <= shape[1])).all():
            raise ValueError(f"accept_lengths: expected 0 to {shape[1]}, got others in a trace; record again")


def synthetic_traces(
    count: int,
    *,
    draft_length: int = 7,
    tokens: int = 128,
    mean_logit: float = 1.2,
    between: float = 0.8,
    within: float = 1.2,
    persistence: float = 0.8,
    decay: float = 0.1,
    noise: float = 0.5,
    seed: int = 0,
) -> list[Trace]:
    """Requests whose text is easy to foresee in places and hard in others.

    Args:
      count: requests.
      draft_length: draft tokens.
      tokens: positions of each.
      mean_logit: of the probability that a draft token is accepted, given those before it.
      between: deviation of that between requests.
      within: between the positions of one.
      persistence: correlation of neighbouring positions.
      decay: by which the logit falls with every draft token.
      noise: deviation of the confidence's logit from the true one.
      seed: of everything.
    """
    rng = np.random.default_rng(seed)
    traces = []
    for _ in range(count):
        ease = np.empty((tokens + draft_length,))
        ease[0] = rng.normal()
        for t in range(1, len(ease)):
            ease[t] = persistence * ease[t - 1] + math.sqrt(1 - persistence**2) * rng.normal()
        ease = mean_logit + between * rng.normal() + within * ease
        ahead = np.lib.stride_tricks.sliding_window_view(ease, draft_length)[:tokens]
        logits = ahead - decay * np.arange(draft_length)
        accepted = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
        # The confidence is what a calibrated head would say of a noisy look at the logit.
        mean = mean_logit - decay * np.arange(draft_length)
        spread = between**2 + within**2
        trust = spread / (spread + noise**2)
        seen = mean + trust * (logits + noise * rng.normal(size=logits.shape) - mean)
        seen = seen / math.sqrt(1 + math.pi / 8 * trust * noise**2)
        traces.append(
            Trace(
                confidence=1 / (1 + np.exp(-seen)),
                accept_lengths=np.cumprod(accepted, axis=1).sum(axis=1),
            )
        )
    return traces


def recorded_traces(
    confidence: np.ndarray, accept_lengths: np.ndarray, requests: np.ndarray, positions: np.ndarray
) -> list[Trace]:
    """Traces of rounds that were really decoded: a position where none began is like the last one that did.

    Args:
      confidence: [rounds, drafts], calibrated.
      accept_lengths: [rounds].
      requests: [rounds], which request each round was of.
      positions: [rounds], emitted tokens before it.
    """
    traces = []
    for request in np.unique(requests):
        mine = np.flatnonzero(requests == request)
        at = positions[mine] - positions[mine].min()
        nearest = mine[np.searchsorted(at, np.arange(at.max() + 1), side="right") - 1]
        traces.append(Trace(confidence=confidence[nearest], accept_lengths=accept_lengths[nearest]))
    return traces


def save_traces(traces: Sequence[Trace], path: Path) -> None:
    """Writes traces as JSON Lines, one request per line."""
    lines = [
        json.dumps({"confidence": t.confidence.tolist(), "accept_lengths": t.accept_lengths.tolist()})
        for t in traces
    ]
    path.write_text("\n".join(lines) + "\n", "utf-8")


def load_traces(path: Path) -> list[Trace]:
    """Reads traces.

    Raises:
      ValueError: no such file, or a line that is no trace.
    """
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as problem:
        raise ValueError(
            f"traces: expected JSON Lines, got {str(path)!r} ({problem}); check the path"
        ) from problem
    traces = []
    for number, line in enumerate(lines, start=1):
        try:
            values = json.loads(line)
            traces.append(
                Trace(
                    confidence=np.asarray(values["confidence"], np.float64),
                    accept_lengths=np.asarray(values["accept_lengths"], np.int64),
                )
            )
        except (ValueError, KeyError, TypeError) as problem:
            raise ValueError(f"{path}:{number}: expected a trace, got {line[:60]!r} ({problem})") from problem
    if not traces or len({t.confidence.shape[1] for t in traces}) > 1:
        raise ValueError(
            f"{path}: expected traces of one draft length, got {len(traces)} traces; record again"
        )
    return traces
