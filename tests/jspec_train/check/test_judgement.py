"""What counts as better, and which step is accused."""

import numpy as np
import pytest

from jspec.results import Counters, Result
from jspec_train.check.decoded_step import Answers, commit_length, decoded_step
from jspec_train.check.diagnosis import diagnosis
from jspec_train.check.finding import failed, passed
from jspec_train.check.perturbation import judge, other_orders, shifted
from jspec_train.check.perturbed import Change, Rows, change
from jspec_train.check.program import keep_together


def rows(correct, loss=1.0) -> Rows:
    """Of texts with two anchors of two drafts each."""
    correct = np.asarray(correct, bool).reshape(-1, 2, 2)
    return Rows(correct=correct, loss=np.full(correct.shape, loss), counted=np.ones(correct.shape, bool))


def gain(before: float, after: float, *, least: float = 0.02) -> Change:
    return Change(
        name=f"to {after}",
        least=least,
        accuracy=after,
        accuracy_before=before,
        error=0.001,
        loss=1,
        loss_before=2,
    )


def test_a_gain_in_every_text_is_clear_and_one_in_a_single_text_is_chance():
    before = rows([[0, 0, 0, 1]] * 4)
    everywhere = change("all", before, rows([[0, 0, 1, 1]] * 4, loss=0.5))
    assert everywhere.gain == 0.25 and everywhere.error == 0 and everywhere.clear
    once = change("one", before, rows([[1, 1, 1, 1]] + [[0, 0, 0, 1]] * 3, loss=0.5))
    # gains of 3, 0, 0, 0 rows in 16: the error is sqrt((2.25^2 + 3 * 0.75^2) * 4 / 3) / 16
    assert once.gain == pytest.approx(3 / 16) and once.error == pytest.approx(3 / 16)
    assert not once.clear


def test_a_gain_with_a_higher_loss_is_not_clear():
    assert not change("loss", rows([[0, 0, 0, 1]] * 4), rows([[0, 0, 1, 1]] * 4, loss=1.5)).clear


def test_only_one_draft_token_is_looked_at_on_request():
    one = change("first", rows([[0, 0, 0, 1]] * 4), rows([[1, 0, 1, 0]] * 4), position=1)
    assert (one.accuracy_before, one.accuracy) == (0, 1)


def test_the_change_that_explains_most_is_accused_and_hides_lesser_ones():
    found = judge({3: [gain(0.0, 0.1)], 4: [gain(0.0, 0.9), gain(0.0, 0.2)], 5: [gain(0.0, 0.01)], 6: []})
    assert [one.status for one in found] == ["not checkable", "fail", "not checkable", "not checkable"]
    assert "0.900 with to 0.9" in found[1].said
    assert "step 4 (alignment) hides it" in found[0].said
    assert "predicts nothing yet" in found[2].said
    assert "no other order" in found[3].said


def test_a_sound_drafter_may_gain_a_little_from_seeing_more():
    found = judge({5: [gain(0.24, 0.27, least=0.05)], 6: [gain(0.24, 0.25)]})
    assert [one.status for one in found] == ["pass", "pass"]


def test_orders_of_few_layers_are_all_tried():
    assert other_orders((1, 4)) == [(4, 1)]
    assert len(other_orders((1, 4, 6))) == 5
    many = other_orders((1, 2, 3, 4, 5))
    assert (5, 4, 3, 2, 1) in many and (2, 1, 3, 4, 5) in many and (1, 2, 3, 4, 5) not in many


def test_features_are_shifted_without_wrapping_around():
    features = np.arange(1, 4, dtype=np.float32).reshape(1, 3, 1)
    assert np.asarray(shifted(features, 1)).ravel().tolist() == [2, 3, 0]
    assert np.asarray(shifted(features, -1)).ravel().tolist() == [0, 1, 2]


def test_tokens_a_round_follow_the_path_that_decoding_takes():
    # Anchors 0..4 of an answer of 6: accept 2 (to 3), accept 9 (cut by the end: one more token is left).
    assert commit_length([np.array([2, 0, 0, 9, 0])], 3, 6) == pytest.approx(5 / 2)
    assert commit_length([np.zeros(5, int)], 3, 6) == 1
    assert commit_length([np.zeros(0, int)], 3, 6) is None


def test_places_that_follow_one_another():
    assert keep_together(np.array([3, 4, 5, 9])).tolist() == [3, 4, 5]
    assert keep_together(np.array([], int)).tolist() == []


def result(ids, committed: int, rounds: int) -> Result:
    counters = Counters(committed=committed, rounds=rounds)
    return Result(text="", token_ids=tuple(ids), finish_reason="length", prompt_ids=(1,), counters=counters)


def decoded(ids=(5, 6, 7), *, along_answers=2.0, along_data=2.0, exact=True):
    answers = Answers(drafted=[result(ids, 4, 2)], plain=[result((5, 6, 7), 3, 3)], max_tokens=4)
    return decoded_step(answers, exact=exact, along_answers=along_answers, along_data=along_data)


def test_decoding_is_held_against_plain_decoding_the_answers_and_the_data():
    assert decoded().status == "pass"
    assert "2.00 tokens a round, 2.00 expected of these answers" in decoded().said
    other = decoded((5, 6, 8))
    assert other.status == "fail" and "prompt 1 does not" in other.said
    assert decoded((5, 6, 8), exact=False).status == "pass"  # bfloat16 may round a tie the other way
    assert "does not do what was trained" in decoded(along_answers=2.5).said
    foreign = decoded(along_data=3.0)
    assert foreign.status == "fail" and "regenerate them" in foreign.said


def test_the_diagnosis_names_the_step_or_what_limits_a_sound_drafter():
    sound = [passed(step, "") for step in range(1, 9)]
    drafted = passed(
        9, "", coverage=[0.9, 0.5], selector_accuracy=[0.9, 0.9], accepted_by_position=[0.9, 0.4]
    )
    end = passed(10, "", mean_commit_length=2.3)
    assert "no selector brings them back" in diagnosis([*sound, drafted, end])
    drafted = passed(
        9, "", coverage=[0.9, 0.9], selector_accuracy=[0.9, 0.5], accepted_by_position=[0.9, 0.4]
    )
    assert "the selector can be improved" in diagnosis([*sound, drafted, end])
    drafted = passed(9, "", accepted_by_position=[0.9, 0.1])
    assert "first draft token is good" in diagnosis([*sound, drafted, end])
    drafted = passed(9, "", accepted_by_position=[0.9, 0.6])
    assert "2.30 tokens a round" in diagnosis([*sound, drafted, end])
    assert "step 5 (anchor leak)" in diagnosis([*sound[:4], failed(5, ""), *sound[5:], drafted, end])
    assert "bonus" in diagnosis([*sound, drafted, failed(10, "", outputs_that_differ=1)])
