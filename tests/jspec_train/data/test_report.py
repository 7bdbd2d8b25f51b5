import json

import pytest

from jspec_train.data.report import CUT, NO_ANSWER_FOUND, TOO_LITTLE, Outcome, Report


def test_a_report_adds_rows_up_and_keeps_the_first_of_each_reason():
    report = Report()
    for number, outcome in enumerate(
        (
            Outcome(kept=1, truncated=True, longest_answer=4),
            Outcome(dropped=CUT, detail="(d)"),
            Outcome(dropped=CUT),
            Outcome(dropped=TOO_LITTLE, out_of_order=True),
            Outcome(kept=2, unserved=3, missed=1, retokenised=True, longest_answer=2),
        )
    ):
        report = report.plus(f"a:{number}", outcome)
    assert (report.rows, report.kept, report.truncated, report.out_of_order) == (5, 3, 1, 1)
    assert report.dropped == {CUT: 2, TOO_LITTLE: 1}
    assert report.first_dropped == {CUT: "a:1 (d)", TOO_LITTLE: "a:3"}
    assert (report.unserved, report.missed, report.retokenised, report.longest_answer) == (3, 1, 1, 4)
    assert Report(**json.loads(json.dumps(report.state))) == report
    report.check()


def test_nothing_left_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="data: expected at least one row, got none"):
        Report().check()
    report = Report().plus("a:1", Outcome(dropped=CUT)).plus("a:2", Outcome(dropped=NO_ANSWER_FOUND))
    report = report.plus("a:3", Outcome(dropped=NO_ANSWER_FOUND))
    with pytest.raises(
        ValueError, match=r"got none of 3 rows; 2 were dropped: no answer .* a:2.*leaves every row untrained"
    ):
        report.check()
