"""Greedy verification: the walk along the target's own choices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.round import OneHot, Proposal
from jspec.target_rows import TargetRows
from jspec.verify.greedy import follow, greedy_choices


def walk(tokens, choices, verify_lengths=None, lengths=None):
    tokens = np.asarray(tokens)
    lanes, drafts = tokens.shape
    proposal = Proposal(
        tokens=jnp.asarray(tokens, jnp.int32),
        lengths=jnp.asarray(lengths if lengths is not None else [drafts] * lanes, jnp.int32),
        q=OneHot(),
    )
    verified = jnp.asarray(verify_lengths if verify_lengths is not None else [drafts] * lanes, jnp.int32)
    accept_length, bonus = jax.jit(follow)(proposal, jnp.asarray(choices, jnp.int32), verified)
    return np.asarray(accept_length).tolist(), np.asarray(bonus).tolist()


def test_walk_ends_at_the_first_token_that_was_not_chosen():
    choices = [[4, 5, 6, 7]] * 5
    drafts = [[4, 5, 6], [4, 5, 0], [4, 0, 6], [0, 5, 6], [0, 0, 0]]
    assert walk(drafts, choices) == ([3, 2, 1, 0, 0], [7, 6, 5, 4, 4])


@pytest.mark.parametrize("verify_length", [0, 1, 2, 3])
def test_cut_ends_the_walk_and_the_bonus_is_the_choice_there(verify_length):
    assert walk([[4, 5, 6]], [[4, 5, 6, 7]], [verify_length]) == ([verify_length], [4 + verify_length])


def test_anchor_row_judges_the_first_draft_token():
    assert walk([[3]], [[2, 9]]) == ([0], [2])


def test_placeholder_is_never_walked_to():
    # The target wants 0 after the first token; the second is a placeholder that happens to be 0.
    assert walk([[4, 0, 0]], [[4, 0, 0, 9]], lengths=[1]) == ([1], [0])
    assert walk([[0, 0]], [[0, 0, 9]], lengths=[0]) == ([0], [0])
    assert walk([[-1, -1]], [[-1, -1, 9]]) == ([0], [-1])


def test_nothing_proposed_emits_the_choice():
    assert walk(np.zeros((2, 0), int), [[3], [5]]) == ([0, 0], [3, 5])


def test_ties_go_to_the_lowest_id_on_every_row():
    logits = jnp.asarray(
        [[1.0, 7.0, 7.0, 0.0], [7.0, 7.0, 7.0, 7.0], [0.0, 1.0, 2.0, 2.0], [0.0, 0.0, 0.0, 0.0]]
    )
    zeros = jnp.zeros((4,))
    rows = TargetRows(logits=logits, log_normaliser=zeros, floor=zeros - jnp.inf, starts=jnp.asarray([0, 2]))
    np.testing.assert_array_equal(greedy_choices(rows, 2), [[1, 0], [2, 0]])
