"""What each lane verifies, against a brute-force ranking."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.round import OneHot, Proposal
from jspec.schedule.allotment import allot
from jspec.schedule.survival import Curve, survival_of

ALLOT = jax.jit(allot)


def floats(*rows):
    return jnp.array(rows, jnp.float32)


def ints(*values):
    return jnp.array(values, jnp.int32)


def proposal(confidence, parents=None):
    confidence = floats(*confidence)
    return Proposal(
        tokens=jnp.zeros(confidence.shape, jnp.int32),
        lengths=jnp.full(confidence.shape[:1], confidence.shape[1], jnp.int32),
        q=OneHot(),
        confidence=confidence,
        parents=None if parents is None else ints(*parents),
        tree_depth=0 if parents is None else confidence.shape[1],
    )


def brute_force(survival, lengths, slots, budget):
    ranked = sorted(
        (-survival[lane, j], j, slots[lane], lane)
        for lane in range(len(lengths))
        for j in range(lengths[lane])
    )
    return np.bincount([lane for *_, lane in ranked[:budget]], minlength=len(lengths))


def test_worked_row():
    survival = floats((0.9, 0.5, 0.2), (0.8, 0.7, 0.1))
    assert ALLOT(survival, ints(3, 3), ints(0, 1), 4).tolist() == [2, 2]


@pytest.mark.parametrize("ties", [False, True])
def test_every_budget_equals_the_ranking(ties):
    rng = np.random.default_rng(0)
    confidence = rng.random((5, 4)).astype(np.float32)
    if ties:
        confidence = np.ceil(confidence * 4) / 4
    survival = np.cumprod(confidence, axis=1)
    lengths, slots = np.array([4, 0, 2, 4, 3], np.int32), np.array([6, 2, 0, 1, 5], np.int32)
    for budget in range(lengths.sum() + 3):
        got = np.asarray(ALLOT(jnp.asarray(survival), jnp.asarray(lengths), jnp.asarray(slots), budget))
        np.testing.assert_array_equal(got, brute_force(survival, lengths, slots, budget))
        assert got.sum() == min(budget, lengths.sum())


def test_without_confidence_earlier_positions_come_first_then_lower_slots():
    ones, lengths = jnp.ones((3, 3), jnp.float32), ints(3, 1, 2)
    for budget, expected in ((6, [3, 1, 2]), (4, [2, 1, 1]), (1, [1, 0, 0]), (0, [0, 0, 0])):
        assert ALLOT(ones, lengths, ints(0, 1, 2), budget).tolist() == expected
    assert ALLOT(ones, lengths, ints(5, 1, 2), 1).tolist() == [0, 1, 0]


def test_permuting_lanes_permutes_the_result():
    rng = np.random.default_rng(1)
    survival = np.cumprod(np.ceil(rng.random((4, 3)) * 3) / 3, axis=1).astype(np.float32)
    slots, lengths = np.array([3, 0, 2, 1], np.int32), np.array([3, 3, 1, 2], np.int32)
    for order in itertools.islice(itertools.permutations(range(4)), 0, 24, 5):
        order = list(order)
        for budget in (1, 3, 5):
            one = np.asarray(ALLOT(jnp.asarray(survival), jnp.asarray(lengths), jnp.asarray(slots), budget))
            other = ALLOT(
                jnp.asarray(survival[order]), jnp.asarray(lengths[order]), jnp.asarray(slots[order]), budget
            )
            np.testing.assert_array_equal(one[order], other)


def test_padding_may_hold_anything():
    survival = floats((0.9, np.nan, np.nan), (np.nan, np.nan, np.nan), (0.8, 0.3, np.nan))
    assert ALLOT(survival, ints(1, 0, 2), ints(4, -1, 1), 2).tolist() == [1, 0, 1]


def test_a_token_never_depends_on_the_confidence_of_later_ones():
    """The lengths up to a position are a function of the confidence up to it: no peeking."""
    rng = np.random.default_rng(2)
    for budget in range(9):
        for position in range(3):
            base = rng.random((2, 4)).astype(np.float32)
            seen = set()
            for later in (0.0, 0.3, 1.0, np.nan, 7.0):
                confidence = base.copy()
                confidence[0, position + 1 :] = later
                survival = survival_of(proposal(confidence))
                length = int(ALLOT(survival, ints(4, 4), ints(0, 1), budget)[0])
                seen.add(min(length, position + 1))
            assert len(seen) == 1


def test_a_confidence_that_is_no_probability_counts_as_one_at_its_place():
    survival = survival_of(proposal([(0.5, np.nan, 0.5), (2.0, -1.0, np.inf), (0.0, 1.0, 1.0)]))
    np.testing.assert_allclose(survival, [(0.5, 0.5, 0.25), (1, 1, 1), (0, 0, 0)])


def test_survival_of_a_tree_multiplies_along_the_path():
    # 1 and 2 hang on the anchor, 3 and 4 on 1, 5 on 3.
    tree = proposal([(0.5, 0.4, 0.9, 0.1, 0.8)], parents=[(0, 0, 1, 1, 3)])
    np.testing.assert_allclose(survival_of(tree)[0], (0.5, 0.4, 0.45, 0.05, 0.36), rtol=1e-6)


def test_a_tree_verifies_a_prefix_of_its_nodes_so_a_smaller_one_is_a_tree():
    tree = proposal([(0.5, 0.4, 0.9, 0.1, 0.8), (0.9, 0.2, 0.2, 0.2, 0.2)], parents=[(0, 0, 1, 1, 3)] * 2)
    survival = survival_of(tree)
    for budget in range(11):
        lengths = ALLOT(survival, ints(5, 5), ints(0, 1), budget)
        assert int(lengths.sum()) == budget
    # Node 3 (0.45) is behind node 2 (0.4) in the order, so it counts for no more than that: 0.42 comes first.
    other = floats(survival[0], (0.9, 0.42, 0.1, 0.1, 0.1))
    assert ALLOT(other, ints(5, 5), ints(0, 1), 3).tolist() == [1, 2]
    assert ALLOT(other, ints(5, 5), ints(0, 1), 4).tolist() == [2, 2]


def test_calibration_goes_by_depth_in_a_tree():
    curve = Curve(temperatures=(2.0, 0.5), offsets=(0.0, 1.0))
    chain, tree = proposal([(0.8, 0.8)]), proposal([(0.8, 0.8, 0.8)], parents=[(0, 0, 1)])

    def by(value, temperature, offset):
        return 1 / (1 + np.exp(-(np.log(value / (1 - value)) / temperature + offset)))

    first, second = by(0.8, 2.0, 0.0), by(0.8, 0.5, 1.0)
    np.testing.assert_allclose(survival_of(chain, curve)[0], (first, first * second), rtol=1e-5)
    np.testing.assert_allclose(survival_of(tree, curve)[0], (first, first, first * second), rtol=1e-5)


@pytest.mark.parametrize(
    ("temperatures", "offsets"), [((), ()), ((0.0,), (0.0,)), ((float("nan"),), (0.0,)), ((1.0,), ())]
)
def test_wrong_curves_are_refused(temperatures, offsets):
    with pytest.raises(ValueError, match="expected"):
        Curve(temperatures=temperatures, offsets=offsets)
