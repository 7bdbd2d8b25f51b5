"""Candidates, scores and walks of DFlash 2, on tables that can be followed by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.dflash2_lattice import (
    Candidates,
    candidate_scores,
    greedy_choice,
    lattice,
    sampled_choice,
    top_candidates,
    walk,
)


def test_candidates_are_the_best_ids_and_ties_go_to_the_lowest():
    found = top_candidates(jnp.asarray([[1.0, 3.0, 2.0, 3.0, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0]]), 3)
    assert found.ids.tolist() == [[1, 3, 2], [0, 1, 2]]
    assert found.unary.tolist() == [[3, 3, 2], [0, 0, 0]]


@pytest.mark.parametrize("vocabulary", [127, 128, 129, 640, 1000, 1153])
@pytest.mark.parametrize("top_k", [1, 4, 9])
def test_candidates_of_a_large_vocabulary_equal_a_stable_sort(vocabulary, top_k):
    random = np.random.default_rng(vocabulary + top_k)
    logits = random.integers(-3, 4, (6, vocabulary)).astype(np.float32)  # many ties
    logits[1] = random.normal(size=vocabulary)
    logits[2, random.integers(0, vocabulary, vocabulary // 2)] = -np.inf
    logits[3] = -np.inf
    logits[4] = 1.0
    found = top_candidates(jnp.asarray(logits), top_k)
    expected = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    np.testing.assert_array_equal(found.ids, expected)
    np.testing.assert_array_equal(found.unary, np.take_along_axis(logits, expected, axis=1))


def test_ties_go_to_the_lowest_id_in_whatever_block_the_best_one_is():
    logits = (
        jnp.zeros((1, 1000)).at[0, jnp.asarray([900, 901, 10, 11])].set(jnp.asarray([3.0, 1.0, 2.0, 1.0]))
    )
    assert top_candidates(logits, 4).ids.tolist() == [[900, 10, 11, 901]]


@pytest.mark.parametrize("vocabulary", [5, 1000])
def test_a_row_with_nan_has_no_candidates_and_others_do_not_notice(vocabulary):
    logits = jnp.zeros((2, 2, vocabulary)).at[0, 1, 3].set(jnp.nan)
    found = top_candidates(logits, 2)
    assert found.ids.shape == (2, 2, 2)
    assert jnp.isnan(found.unary).tolist() == [[[False] * 2, [True] * 2], [[False] * 2] * 2]


def test_scores_add_the_product_of_predecessor_hidden_and_successor():
    scores = candidate_scores(
        jnp.asarray([2.0, 3.0]),
        jnp.asarray([1.0, 10.0]),
        jnp.asarray([[1.0, 0.0], [0.0, 1.0]]),
        jnp.asarray([0.5, -1.0]),
    )
    assert scores.tolist() == [2.5, 29.0]


# Two draft rows with two candidates each; after token 5 or the anchor 9, as the name of the table says.
IDS = jnp.asarray([[[4, 5], [6, 7]]])
FIRST = {9: [1.0, 0.0]}
SECOND = {4: [0.0, 0.5], 5: [9.0, 0.0]}


def scores_after(row: int, before: jax.Array) -> jax.Array:
    table = (FIRST, SECOND)[row]
    return jnp.stack([jnp.asarray(table.get(int(token), [0.0, 0.0])) for token in before])


def test_lattice_holds_every_predecessor_and_the_anchor_in_row_0():
    def scores(before: jax.Array) -> jax.Array:
        return jnp.stack([scores_after(row, before[:, row]) for row in (0, 1)], axis=1)

    whole = lattice(scores, jnp.asarray([9]), Candidates(ids=IDS, unary=jnp.zeros((1, 2, 2))))
    assert whole.tolist() == [[[[1.0, 0.0], [1.0, 0.0]], [[0.0, 0.5], [9.0, 0.0]]]]


def test_greedy_walk_takes_the_best_step_and_does_not_look_ahead():
    path = walk(jnp.asarray([9]), IDS, scores_after, lambda row, scores: greedy_choice(scores))
    assert path.tokens.tolist() == [[4, 7]]  # not 5, 6 with their sum of 9
    assert path.probs.tolist() == [[[1.0, 0.0], [0.0, 1.0]]]


def test_a_walk_ends_where_scores_are_none():
    def score(row: int, before: jax.Array) -> jax.Array:
        return jnp.asarray([[0.0, 1.0], [jnp.nan, 0.0]]) if row == 0 else jnp.ones((2, 2))

    ids = jnp.asarray([[[4, 5], [6, 7]]] * 2)
    path = walk(jnp.asarray([9, 9]), ids, score, lambda row, scores: greedy_choice(scores))
    assert path.tokens.tolist() == [[5, 6], [-1, -1]]
    assert path.probs.tolist() == [[[0, 1], [1, 0]], [[0, 0], [0, 0]]]


@pytest.mark.parametrize(
    ("coin", "index"), [(0.0, 0), (0.2, 0), (0.26, 1), (0.74, 1), (0.76, 2), (1 - 2**-24, 2)]
)
def test_inverse_cdf_follows_the_order_of_the_candidates(coin, index):
    scores = jnp.log(jnp.asarray([[1.0, 2.0, 1.0]])) * 2  # at temperature 2, probabilities 1/4, 1/2, 1/4
    taken, probs = sampled_choice(scores, jnp.asarray([2.0]), jnp.asarray([coin]))
    np.testing.assert_allclose(probs, [[0.25, 0.5, 0.25]], rtol=1e-6)
    assert taken.tolist() == [index]


def test_tiny_temperatures_are_greedy_and_hopeless_candidates_never_drawn():
    scores = jnp.asarray([[0.0, 2.0, 1.0], [-jnp.inf, 0.0, -jnp.inf], [jnp.nan, 1.0, 0.0], [-jnp.inf] * 3])
    taken, probs = sampled_choice(scores, jnp.asarray([1e-20, 1.0, 1.0, 1.0]), jnp.asarray([0.99] * 4))
    assert taken.tolist() == [1, 1, -1, -1]
    assert probs[:2].tolist() == [[0, 1, 0], [0, 1, 0]]
