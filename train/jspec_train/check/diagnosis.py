"""Which symptom the figures are, and where to look then.

Source: the rows are those of a survey of speculative decoding (its table of training metrics against
failures in deployment), as far as they concern block drafters.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec_train.check.finding import Finding

_LOW_COVERAGE, _GOOD_SELECTOR = 0.7, 0.8
_GOOD_FIRST, _LITTLE_LEFT = 0.6, 0.25


def diagnosis(findings: Sequence[Finding]) -> str:
    """The row that the findings point to, in one line."""
    by_step = {finding.step: finding for finding in findings}
    wrong = [finding.step for finding in findings if finding.status == "fail"]
    if 8 in wrong:
        return "the export is incomplete: nothing else can be judged before it loads"
    decoded = by_step[10].figures
    if 10 in wrong and decoded.get("outputs_that_differ"):
        return (
            "tokens look right at first and go wrong later: look at the cache of the accepted path, the bonus "
            "token that is not executed yet, and the vocabulary mapping"
        )
    if wrong:
        steps = ", ".join(f"{step} ({by_step[step].name})" for step in wrong)
        return (
            f"training loss is low and acceptance in deployment poor: look at step {steps}; it is a leak, another "
            "pairing, template or sampling than in training, or a metric that is only teacher-forced"
        )
    return _among_sound(by_step[9].figures, decoded)


def _among_sound(drafted: Mapping[str, Any], decoded: Mapping[str, Any]) -> str:
    if "coverage" in drafted:
        coverage, selector = drafted["coverage"], drafted["selector_accuracy"]
        if min(coverage) < _LOW_COVERAGE:
            good = "high" if min(selector) >= _GOOD_SELECTOR else "not high either"
            return (
                f"coverage falls to {min(coverage):.2f} and selector accuracy is {good}: labels are not among the "
                "candidates, and no selector brings them back; look at backbone, local dependence and data"
            )
        if min(selector) < _GOOD_SELECTOR:
            return (
                f"coverage is at least {min(coverage):.2f}, selector accuracy falls to {min(selector):.2f}: "
                "the selector can be improved"
            )
    positions = drafted.get("accepted_by_position")
    if positions and positions[0] >= _GOOD_FIRST and positions[-1] < _LITTLE_LEFT * positions[0]:
        return (
            f"the first draft token is good ({positions[0]:.2f}) and the last poor ({positions[-1]:.2f}): no fault "
            "of the files; more training, weight on later rows, or a shorter draft"
        )
    length = decoded.get("mean_commit_length")
    if length is not None:
        return (
            f"nothing found, {length:.2f} tokens a round: if tokens/s do not rise with it, look at the costs of "
            "drafting, commit and the rows that verification executes (`jspec bench`)"
        )
    return "nothing found in what could be checked"
