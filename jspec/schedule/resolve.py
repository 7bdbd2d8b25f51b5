"""From files to what an engine's schedule needs, checked against the engine."""

import dataclasses
import logging
from pathlib import Path

import numpy as np

from jspec.buckets import Ladder
from jspec.drafters.protocol import Drafter
from jspec.hardware import hardware_name
from jspec.schedule.calibration_file import Calibration, load_calibration
from jspec.schedule.costs import MeasuredCosts, RoundCosts, check_costs, load_costs
from jspec.schedule.survival import Curve

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """What decides how much is verified; nothing of it = everything is."""

    costs: RoundCosts | None = None
    curve: Curve | None = None  # calibration of the confidence
    typical: tuple[float, ...] | None = None  # mean survival of a chain's draft tokens


def resolve_schedule(
    costs: str | Path | RoundCosts | None,
    calibration: str | Path | Calibration | None,
    *,
    target: str,
    drafter: Drafter,
    dtype: str,
    max_slots: int,
) -> Schedule:
    """Loads a cost table and a calibration, and holds them against what is about to decode.

    Args:
      costs: cost table, or its file; None = no schedule.
      calibration: of the drafter's confidence, or its file; None = the confidence as it is.
      target: its identity.
      drafter: that will draft.
      dtype: name of the type of weights and cache.
      max_slots: of the engine.

    Raises:
      ValueError: a file that is wrong, or one that belongs to something else.
    """
    if calibration is not None and costs is None:
        raise ValueError(
            "calibration: expected None without a schedule, which alone uses it, got one; pass schedule="
        )
    if costs is None:
        return Schedule()
    if isinstance(costs, str | Path):
        costs = load_costs(costs)
    ladder = Ladder(max_slots=max_slots, draft_length=drafter.draft_length, chunks=(1,))
    check_costs(
        costs,
        hardware=hardware_name(),
        target=target,
        drafter=drafter.name,
        draft_length=drafter.draft_length,
        dtype=dtype,
        buckets=[bucket for count in range(1, max_slots + 1) for bucket in ladder.scheduled(count)],
    )
    if not isinstance(costs, MeasuredCosts):
        log.warning("schedule: the cost table does not say for which machine, target and drafter it holds")
    if calibration is None:
        log.warning("schedule: no calibration, so the drafter's confidence is taken as it is")
        return Schedule(costs=costs)
    if isinstance(calibration, str | Path):
        calibration = load_calibration(calibration)
    calibration.check(target=target, drafter=drafter.name, draft_length=drafter.draft_depth)
    if calibration.target is None:
        log.warning("calibration: it does not say for which target and drafter it holds")
    is_chain = drafter.draft_depth == drafter.draft_length
    return Schedule(costs=costs, curve=calibration.curve, typical=calibration.survival if is_chain else None)


def dtype_name(dtype: object) -> str:
    """How files name it: "float32"."""
    return np.dtype(dtype).name  # type: ignore[arg-type]
