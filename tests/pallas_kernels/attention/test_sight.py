"""The builders of Sight."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.sight import block_sight, causal_sight

OFFSETS = jnp.array([0, 2, 3], jnp.int32)
TABLE = jnp.array([[0, 1], [2, 3]], jnp.int32)
LENGTHS = jnp.array([5, 0], jnp.int32)
POSITIONS = jnp.array([5, 6, 0, 0], jnp.int32)


@pytest.mark.parametrize(("window", "first"), [(None, [0, 0, 0, 0]), (1, [5, 6, 0, 0]), (4, [2, 3, 0, 0])])
def test_a_window_counts_the_query_itself(window, first):
    for build in (causal_sight, block_sight):
        sight = build(OFFSETS, TABLE, LENGTHS, POSITIONS, max_queries=2, window=window)
        np.testing.assert_array_equal(sight.first_visible, first)


def test_causal_sight_needs_no_words():
    sight = causal_sight(OFFSETS, TABLE, LENGTHS, POSITIONS, max_queries=2)
    assert sight.visible.shape == (4, 0)
    assert bool(sight.causal.all())


def test_block_sight_names_every_key():
    sight = block_sight(OFFSETS, TABLE, LENGTHS, POSITIONS, max_queries=33)
    np.testing.assert_array_equal(sight.visible, np.full((4, 2), -1))
    assert not bool(sight.causal.any())
