import pytest

from jspec.bench.loops import loop_period


@pytest.mark.parametrize("period", [1, 3, 10])
def test_tail_that_repeats_is_a_loop(period):
    text = [100, 101, 102, *(list(range(period)) * (60 // period))]
    assert loop_period(text) == period


@pytest.mark.parametrize(("period", "count"), [(1, 24), (4, 24), (5, 24), (8, 32), (24, 96)])
def test_a_loop_may_be_just_as_long_as_it_takes(period, count):
    text = [i % period for i in range(count)]
    assert loop_period(text) == period
    assert loop_period(text[1:]) is None


def test_text_without_repetition_is_no_loop():
    assert loop_period(list(range(200))) is None


def test_few_repeats_are_no_loop():
    assert loop_period([*range(50), *range(50)]) is None
    assert loop_period([7] * 10) is None


def test_loop_that_ended_is_no_loop():
    assert loop_period([5] * 100 + list(range(30))) is None
