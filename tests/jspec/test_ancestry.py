"""Ancestors and depths from parents, against a walk up from every node."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.ancestry import ancestors, depths


@pytest.mark.parametrize("drafts", [1, 2, 3, 8, 15])
def test_ancestors_of_a_chain_are_all_nodes_before(drafts):
    parents = jnp.arange(drafts, dtype=jnp.int32)[None]
    np.testing.assert_array_equal(ancestors(parents)[0], np.tri(drafts + 1, drafts, k=-1))


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=12, max_size=12))
def test_ancestors_and_depths_are_those_of_the_walk_up(raw):
    parents = [min(parent, draft) for draft, parent in enumerate(raw)]
    expected = np.zeros((13, 12), bool)
    for node in range(1, 13):
        above = node
        while above:
            expected[node, above - 1] = True
            above = parents[above - 1]
    given_parents = jnp.asarray([parents], jnp.int32)
    np.testing.assert_array_equal(ancestors(given_parents)[0], expected)
    np.testing.assert_array_equal(depths(given_parents)[0], expected.sum(axis=1))


def test_parents_past_the_length_disturb_nobody():
    parents = jnp.asarray([[0, 1, -7, 99]], jnp.int32)
    np.testing.assert_array_equal(depths(parents)[0, :3], [0, 1, 2])
    np.testing.assert_array_equal(ancestors(parents)[0, :3], np.tri(3, 4, k=-1))
