"""Rejection sampling: the target's exact law for every kind of q, length and cut."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law import P, Q, V, emitted_law, proposal_of, rows_after, target_law

from jspec.coins import Coins
from jspec.round import Dense, OneHot, Proposal, Sparse
from jspec.verify.rejection import reject

KINDS = ["one-hot", "dense", "reduced", "sparse"]
verdict_of = jax.jit(reject)


def constant(value: int):
    return lambda path: value


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verify_length", [0, 1, 2])
def test_law_is_the_targets_at_every_cut(kind, verify_length):
    law = emitted_law(reject, kind, constant(2), constant(verify_length))
    np.testing.assert_allclose(law, target_law(), atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [0, 1])
def test_law_is_the_targets_when_less_is_proposed(kind, length):
    law = emitted_law(reject, kind, constant(length), constant(length))
    np.testing.assert_allclose(law, target_law(), atol=1e-6)


@pytest.mark.parametrize("kind", ["dense", "sparse"])
def test_law_is_the_targets_when_earlier_tokens_choose_the_cut(kind):
    law = emitted_law(reject, kind, constant(2), lambda path: 2 if path[0] in (1, 6) else 1)
    np.testing.assert_allclose(law, target_law(), atol=1e-6)


def test_enumeration_sees_the_bias_of_a_length_that_looks_at_its_own_token():
    # What a schedule must not do: admit the second token because of what it is.
    law = emitted_law(reject, "dense", lambda path: 2 if path[1] == 1 else 1, constant(2))
    assert np.abs(law - target_law()).max() > 1e-3


def test_argmax_proposal_is_scored_as_one_hot():
    # p = (.4, .3, .15, .1, .05), the draft is q's argmax; scored with the soft q the law is off by .37.
    p = np.asarray([0.4, 0.3, 0.15, 0.1, 0.05, 0, 0, 0])
    lanes = 20 * 400
    accept, bonus = (
        grid.ravel() for grid in np.meshgrid((np.arange(20) + 0.5) / 20, (np.arange(400) + 0.5) / 400)
    )
    paths = np.full((lanes, 1), 1)
    table = np.broadcast_to(p, (V, V))
    proposal = Proposal(
        tokens=jnp.asarray(paths, jnp.int32),
        lengths=jnp.ones((lanes,), jnp.int32),
        q=OneHot(),
    )
    coins = Coins(accept=jnp.asarray(accept[:, None], jnp.float32), bonus=jnp.asarray(bonus, jnp.float32))
    accept_length, token = verdict_of(
        proposal, rows_after(paths, table), jnp.ones((lanes,), jnp.int32), coins
    )
    first = np.where(np.asarray(accept_length) == 1, 1, np.asarray(token))
    np.testing.assert_allclose(np.bincount(first, minlength=V) / lanes, p, atol=0.002)


def one(tokens, q, accept, bonus=0.5, length=None, verify_length=None, probs=P):
    """Verdict on a single lane."""
    paths = np.asarray([tokens])
    drafts = paths.shape[1]
    proposal = Proposal(
        tokens=jnp.asarray(paths, jnp.int32),
        lengths=jnp.asarray([drafts if length is None else length]),
        q=q,
    )
    coins = Coins(accept=jnp.asarray([accept], jnp.float32), bonus=jnp.asarray([bonus], jnp.float32))
    rows = rows_after(np.clip(paths, 0, V - 1), probs)
    verify_lengths = jnp.asarray([drafts if verify_length is None else verify_length])
    accept_length, token = verdict_of(proposal, rows, verify_lengths, coins)
    return int(accept_length[0]), int(token[0])


def test_placeholder_is_never_accepted_even_if_the_target_wants_it():
    # After token 3 the target says 0 with certainty, and the placeholder is 0.
    assert one([3, 0], OneHot(), [0.0, 0.0], length=1, verify_length=2) == (1, 0)
    assert one([3, 0], OneHot(), [0.0, 0.0], length=1, verify_length=1) == (1, 0)
    assert one([0, 0], OneHot(), [0.0, 0.0], length=0, verify_length=2)[0] == 0


@pytest.mark.parametrize("placeholder", [-1, V, 2**31 - 1, -(2**31)])
def test_placeholder_may_hold_anything(placeholder):
    for kind in KINDS:
        q = proposal_of(np.asarray([[1, 1]]), np.asarray([1]), kind).q
        assert one([1, placeholder], q, [0.0, 0.0], length=1, bonus=0.0) == (1, 1)


def test_token_without_target_mass_is_refused_at_coin_zero():
    assert one([5], OneHot(), [0.0], bonus=0.0) == (0, 0)
    assert one([5], Dense(probs=jnp.full((1, 1, V), 1 / V), ids=None), [0.0], bonus=0.0)[0] == 0


def test_test_is_strict():
    q = jnp.zeros((1, 1, V)).at[0, 0, 3].set(0.5).at[0, 0, 1].set(0.5)
    # p(3) = 3/16 and q = 1/2: accepted below coin 3/8, refused at it.
    assert one([3], Dense(probs=q, ids=None), [0.375 - 1e-6])[0] == 1
    assert one([3], Dense(probs=q, ids=None), [0.375])[0] == 0


@pytest.mark.parametrize("q", [0.0, -0.25, 1.5, np.nan, np.inf])
def test_q_that_is_no_probability_refuses_and_counts_as_zero(q):
    probs = jnp.zeros((1, 1, V)).at[0, 0, 1].set(q)
    for kind in (
        Dense(probs=probs, ids=None),
        Dense(probs=probs, ids=jnp.arange(V, dtype=jnp.int32)),
        Sparse(ids=jnp.arange(V, dtype=jnp.int32)[None, None, :], probs=probs),
    ):
        # Refused at any coin; the residual is p itself: 4, 6, 1, 3, 2 sixteenths.
        for bonus, token in [(0.24, 0), (0.26, 1), (0.61, 1), (0.65, 2)]:
            assert one([1], kind, [0.0], bonus=bonus) == (0, token)


def test_empty_residual_draws_from_the_target():
    # q >= p everywhere but at no probability: nothing is left of p, and the last id would be wrong.
    probs = jnp.ones((1, 1, V))
    assert one([1], Dense(probs=probs, ids=None), [0.9], bonus=0.99) == (0, 4)


def test_cut_tests_the_first_unverified_token_with_its_own_coin():
    # After the anchor the target gives 1 with 6/16; after 1 it gives 1 with 8/16.
    assert one([1, 1], OneHot(), [0.0, 0.49], verify_length=1) == (1, 1)
    # Refused: the residual after 1 is 2, 2 and 4 eighths on ids 2, 3 and 5.
    assert one([1, 1], OneHot(), [0.0, 0.51], verify_length=1, bonus=0.24) == (1, 2)
    assert one([1, 1], OneHot(), [0.0, 0.51], verify_length=1, bonus=0.51) == (1, 5)
    assert one([1, 1], OneHot(), [0.3, 0.99], verify_length=0) == (0, 1)
    assert one([1, 1], OneHot(), [0.4, 0.0], verify_length=0, bonus=0.0) == (0, 0)


def test_nothing_proposed_is_a_plain_draw():
    for bonus, token in [(0.0, 0), (0.24, 0), (0.26, 1), (0.99, 4)]:
        assert one(np.zeros((0,), int), OneHot(), np.zeros((0,)), bonus=bonus) == (0, token)


def test_broken_row_fails_its_lane_only():
    paths = np.asarray([[1, 1], [1, 1], [1, 1]])
    lengths, coins = np.asarray([2, 2, 2]), Coins(accept=jnp.zeros((3, 2)), bonus=jnp.full((3,), 0.5))
    rows = rows_after(paths)
    for kind in KINDS:
        proposal = proposal_of(paths, lengths, kind)
        clean = verdict_of(proposal, rows, jnp.asarray(lengths), coins)
        for node in range(3):
            broken = dataclasses.replace(rows, logits=rows.logits.at[3 + node].set(jnp.nan))
            accept_length, bonus = verdict_of(proposal, broken, jnp.asarray(lengths), coins)
            np.testing.assert_array_equal(np.asarray(accept_length)[[0, 2]], np.asarray(clean[0])[[0, 2]])
            np.testing.assert_array_equal(np.asarray(bonus)[[0, 2]], np.asarray(clean[1])[[0, 2]])
            assert (int(accept_length[1]), int(bonus[1])) == (node, -1)


def test_dense_q_of_another_size_is_refused():
    with pytest.raises(
        ValueError, match=r"^proposal.q: expected probabilities of 8 ids, got 5; say which ids"
    ):
        one([1], Dense(probs=jnp.full((1, 1, 5), 0.2), ids=None), [0.5])


def test_tables_of_this_test_are_distributions():
    np.testing.assert_array_equal(P.sum(axis=1), 1)
    np.testing.assert_array_equal(Q.sum(axis=1), 1)
