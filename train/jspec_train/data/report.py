"""What became of the rows of a data set: the figures at the end of `jspec prepare`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

NO_USER = "no user message with an answer after it"
NO_ANSWER_FOUND = "no answer found in the rendered text"
REFUSED = "the chat template refuses the messages"
CUT = "the answers lie past max_length"
TOO_LITTLE = "too few trained tokens in a row"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of one row, besides its samples."""

    kept: int = 0  # samples
    dropped: str | None = None  # the reason
    detail: str = ""  # what exactly, for the first row of a reason
    truncated: bool = False  # tokens past max_length were cut off
    out_of_order: bool = False  # messages were dropped because of their roles
    unserved: int = 0  # answers after a text that is not what a server would have sent
    missed: int = 0  # answers that could not be found in the rendered text
    retokenised: bool = False  # a prompt alone has other token ids than it has in the sample
    longest_answer: int = 0  # tokens


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """Sums over rows."""

    rows: int = 0
    kept: int = 0
    dropped: Mapping[str, int] = dataclasses.field(default_factory=dict)  # by reason
    first_dropped: Mapping[str, str] = dataclasses.field(default_factory=dict)  # by reason, a row to look at
    truncated: int = 0
    out_of_order: int = 0
    unserved: int = 0
    missed: int = 0
    retokenised: int = 0
    longest_answer: int = 0

    def plus(self, where: str, outcome: Outcome) -> "Report":
        """The report with one more row."""
        dropped, first = dict(self.dropped), dict(self.first_dropped)
        if outcome.dropped is not None:
            dropped[outcome.dropped] = dropped.get(outcome.dropped, 0) + 1
            first.setdefault(outcome.dropped, f"{where} {outcome.detail}".strip())
        return Report(
            rows=self.rows + 1,
            kept=self.kept + outcome.kept,
            dropped=dropped,
            first_dropped=first,
            truncated=self.truncated + outcome.truncated,
            out_of_order=self.out_of_order + outcome.out_of_order,
            unserved=self.unserved + outcome.unserved,
            missed=self.missed + outcome.missed,
            retokenised=self.retokenised + outcome.retokenised,
            longest_answer=max(self.longest_answer, outcome.longest_answer),
        )

    def check(self) -> None:
        """Refuses a data set of which nothing is left, and says why.

        Raises:
          ValueError: naming the most frequent reason and a row.
        """
        if not self.rows:
            raise ValueError("data: expected at least one row, got none; check the file")
        if self.kept:
            return
        reason = max(self.dropped, key=lambda name: self.dropped[name])
        raise ValueError(
            f"data: expected samples, got none of {self.rows} rows; {self.dropped[reason]} were dropped: {reason} "
            f"(the first is {self.first_dropped[reason]}); {_ADVICE[reason]}"
        )

    @property
    def state(self) -> dict[str, Any]:
        """As JSON; `Report(**state)` reads it back."""
        return dataclasses.asdict(self)


_ADVICE = {
    NO_USER: "rows need a user message and an assistant message after it, or --regenerate",
    NO_ANSWER_FOUND: "the chat template leaves every row untrained: pass the one that the target is served with, "
    "and its variables",
    REFUSED: "pass another chat template, or clean the messages",
    CUT: "raise max_length",
    TOO_LITTLE: "lower --min-run if the method allows it, or take longer answers",
}
