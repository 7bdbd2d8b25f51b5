"""The engines that a benchmark compares: plain decoding and drafters on the same weights."""

from collections.abc import Mapping, Sequence

from jspec.engine import Engine
from jspec.loading import with_drafter


def chains(
    plain: Engine,
    draft_lengths: Mapping[str, Sequence[int | None]],
    schedule: str | None,
    calibration: str | None,
) -> dict[str, Engine]:
    """Plain decoding, then each drafter with each of its draft lengths; with a schedule, also scheduled.

    Args:
      plain: the engine without a drafter.
      draft_lengths: by drafter; None = its own.
      schedule: cost table, if there is one.
      calibration: of the confidence, for the schedule.
    """
    engines = {"plain": plain}
    for name, lengths in draft_lengths.items():
        for length in lengths:
            variant = f"{name} {length}" if len(lengths) > 1 else name
            engines[variant] = with_drafter(plain, name, draft_length=length)
            if schedule is not None:
                engines[f"{variant} scheduled"] = with_drafter(
                    plain, name, draft_length=length, schedule=schedule, calibration=calibration
                )
    return engines
