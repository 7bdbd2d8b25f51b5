"""What a step of the check found."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

Status = Literal["pass", "fail", "not checkable"]

STEPS = (
    "tokenizer and template",
    "captured features",
    "order of layers",
    "alignment",
    "anchor leak",
    "rope",
    "training and decoding code",
    "exported weights",
    "teacher-forced and drafted",
    "decoded",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One line of the report."""

    step: int  # 1, 2, ...: place in `STEPS`
    status: Status
    said: str  # the figure behind it, and what to change where it failed
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # JSON

    @property
    def name(self) -> str:
        """Of the step."""
        return STEPS[self.step - 1]


def passed(step: int, said: str, **figures: Any) -> Finding:
    """A step that found nothing wrong."""
    return Finding(step=step, status="pass", said=said, figures=figures)


def failed(step: int, said: str, **figures: Any) -> Finding:
    """A step that found a fault."""
    return Finding(step=step, status="fail", said=said, figures=figures)


def not_checkable(step: int, reason: str) -> Finding:
    """A step that lacks what it needs."""
    return Finding(step=step, status="not checkable", said=reason)
