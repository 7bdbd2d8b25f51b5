"""The engines that a benchmark compares: plain decoding and drafters on the same weights."""

from collections.abc import Sequence

from jspec.engine import Engine
from jspec.loading import with_drafter


def chains(
    plain: Engine,
    drafters: Sequence[str] | None,
    draft_lengths: Sequence[int] | None,
    schedule: str | None,
    calibration: str | None,
) -> dict[str, Engine]:
    """Plain decoding first, then each drafter with each draft length; with a schedule, also scheduled."""
    engines = {"plain": plain}
    for name in drafters or ["ngram"]:
        for length in draft_lengths or (None,):
            variant = f"{name} {length}" if draft_lengths and len(draft_lengths) > 1 else name
            engines[variant] = with_drafter(plain, name, draft_length=length)
            if schedule is not None:
                engines[f"{variant} scheduled"] = with_drafter(
                    plain, name, draft_length=length, schedule=schedule, calibration=calibration
                )
    return engines
