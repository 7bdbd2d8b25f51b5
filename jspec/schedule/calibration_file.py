"""A calibration on disk: for which target and drafter it holds, and what it is."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from jspec.schedule.costs import read_object
from jspec.schedule.survival import Curve


@dataclasses.dataclass(frozen=True, kw_only=True)
class Calibration:
    """What `jspec calibrate` found. All tuples have an entry per draft token, or per depth of a tree.

    Raises:
      ValueError: tuples of other lengths, or what `Curve` refuses.
    """

    temperatures: tuple[float, ...]
    offsets: tuple[float, ...]
    survival: tuple[float, ...] | None  # mean fraction of rounds that got so far; None = not recorded
    target: str | None  # identity; None = not recorded
    drafter: str | None
    dataset: str
    num_samples: int  # rounds
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]
    fit: str  # "grid" or "likelihood"

    def __post_init__(self) -> None:
        for name in ("offsets", "survival", "ece_before", "ece_after"):
            values = getattr(self, name)
            if values is not None and len(values) != self.draft_length:
                raise ValueError(
                    f"{name}: expected {self.draft_length} numbers, as many as temperatures, got {len(values)}; "
                    "calibrate again"
                )
        if self.survival is not None and not all(0 <= s <= 1 for s in self.survival):
            raise ValueError(
                f"survival: expected numbers in [0, 1], got {list(self.survival)}; calibrate again"
            )
        assert self.curve

    @property
    def draft_length(self) -> int:
        """Draft tokens that it is about."""
        return len(self.temperatures)

    @property
    def curve(self) -> Curve:
        """The calibration itself."""
        return Curve(temperatures=self.temperatures, offsets=self.offsets)

    def check(self, *, target: str, drafter: str, draft_length: int) -> None:
        """Refuses a calibration of something else.

        Args:
          target: identity of the target.
          drafter: name of the drafter.
          draft_length: its draft tokens on a path.

        Raises:
          ValueError: naming what differs.
        """
        wanted = [("target", target), ("drafter", drafter), ("draft_length", draft_length)]
        for name, expected in wanted:
            got = getattr(self, name)
            if got is not None and got != expected:
                raise ValueError(
                    f"calibration: expected one for {name} {expected!r}, got one for {got!r}; run jspec calibrate"
                )


def save_calibration(calibration: Calibration, path: Path) -> None:
    """Writes a calibration as JSON; `temperatures` and what SGLang has beside it are named as there."""
    path.write_text(json.dumps(dataclasses.asdict(calibration), indent=1), "utf-8")


def load_calibration(path: str | Path) -> Calibration:
    """Reads a calibration of `jspec calibrate`, or one of SGLang, which names no target.

    Raises:
      ValueError: no such file, no JSON, or entries that are wrong.
    """
    values = {name: value for name, value in read_object("calibration", path).items() if value is not None}
    fields = [f.name for f in dataclasses.fields(Calibration)]
    unknown = [name for name in values if name not in fields]
    lists = {
        name: _numbers(name, values[name])
        for name in ("temperatures", "offsets", "survival", "ece_before", "ece_after")
        if name in values
    }
    if unknown or "temperatures" not in lists:
        raise ValueError(
            f"calibration: expected temperatures and no names but {', '.join(fields)}, got {', '.join(values) or 'none'} "
            f"in {str(path)!r}; run jspec calibrate"
        )
    count = len(lists["temperatures"])
    nothing = {"survival": None, "target": None, "drafter": None, "dataset": "", "num_samples": 0}
    guess: dict[str, Any] = {"offsets": (0.0,) * count, "fit": "grid"}
    for name in ("ece_before", "ece_after"):
        guess[name] = (math.nan,) * count
    return Calibration(**{**nothing, **guess, **values, **lists})


def _numbers(name: str, value: Any) -> tuple[float, ...]:
    if not isinstance(value, list) or not all(
        isinstance(v, int | float) and not isinstance(v, bool) for v in value
    ):
        raise ValueError(f"{name}: expected a list of numbers, got {str(value)[:60]}; run jspec calibrate")
    return tuple(map(float, value))
