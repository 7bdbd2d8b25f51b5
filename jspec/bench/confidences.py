"""Rounds with their outcome: what a drafter's confidence said, and what was accepted."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jspec.buckets import Bucket
from jspec.decode import Report, Round
from jspec.engine import Engine
from jspec.request import Request
from jspec.settings import Settings

# A float32 sigmoid ends at 0 and 1; this is as near as it comes to them on the way.
NEAREST = 2.0**-24


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """Rounds in which a full proposal was verified."""

    logits: np.ndarray  # float64 [rounds, drafts], of the confidence
    accept_lengths: np.ndarray  # int64 [rounds]
    requests: np.ndarray  # int64 [rounds], which prompt
    positions: np.ndarray  # int64 [rounds], emitted tokens before the round
    unusable: int  # rounds left out because a confidence was NaN or outside [0, 1]


def record(
    engine: Engine,
    prompts: Sequence[object],
    settings: Settings,
    *,
    progress: Callable[[str], None] = lambda _: None,
) -> Recorded:
    """Decodes prompts, every draft token verified, and notes each round.

    Rounds are left out if not every position could have been accepted: short proposals, the end of a text.

    Raises:
      ValueError: the engine has a schedule, its drafter drafts trees or gives no confidence, or no round is
        left.
    """
    drafter = engine.method.drafter
    if engine.method.scheduled or drafter.draft_depth != drafter.draft_length:
        raise ValueError(
            f"drafter: expected one of chains without a schedule, got {drafter.name}"
            f"{' with one' if engine.method.scheduled else ', which drafts trees'}; calibrate a chain of it"
        )
    rows: list[tuple[np.ndarray, int, int, int]] = []
    unusable = 0

    def note(active: Sequence[Request | None], bucket: Bucket, round_: Round, report: Report) -> None:
        nonlocal unusable
        if not bucket.budget:
            return
        if round_.proposal.confidence is None:
            raise ValueError(f"drafter: expected one that gives confidence, got {drafter.name}")
        confidence = np.asarray(round_.proposal.confidence, np.float64)
        for lane, request in enumerate(active):
            if (
                request is None
                or int(report.verified[lane]) < drafter.draft_length
                or int(report.finish[lane])
            ):
                continue
            if not ((confidence[lane] >= 0) & (confidence[lane] <= 1)).all():
                unusable += 1
                continue
            rows.append((confidence[lane], int(report.accepted[lane]), request.index, len(request.token_ids)))

    with engine.session(observer=note) as session:
        session.add(prompts, settings)  # type: ignore[arg-type]
        done = 0
        while session.busy:
            done += sum(piece.finish_reason is not None for piece in session.step())
            progress(f"{done} of {len(prompts)} prompts, {len(rows)} rounds")
    if not rows:
        raise ValueError(
            f"prompts: expected rounds that verify {drafter.draft_length} draft tokens, got none "
            f"({unusable} had confidence outside [0, 1]); use longer answers or more prompts"
        )
    probs = np.clip(np.stack([row[0] for row in rows]), NEAREST, 1 - NEAREST)
    return Recorded(
        logits=np.log(probs) - np.log1p(-probs),
        accept_lengths=np.array([row[1] for row in rows]),
        requests=np.array([row[2] for row in rows]),
        positions=np.array([row[3] for row in rows]),
        unusable=unusable,
    )
