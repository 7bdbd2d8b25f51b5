"""What makes a measured cost doubtful."""

import pytest

from jspec.bench.profile import spread


def test_one_slow_repeat_leaves_a_median_as_it_is_and_no_doubt():
    assert spread([1.0, 1.01, 1.02, 1.01, 1.9]) == pytest.approx(0.01 / 1.01)


def test_repeats_that_differ_make_doubt_however_many_they_are():
    assert spread([1.0, 1.4]) > 0.1
    assert spread([1.0, 1.4] * 10) > spread([1.0, 1.2] * 10) > 0.1


def test_one_repeat_has_no_spread():
    assert spread([1.0]) == 0
