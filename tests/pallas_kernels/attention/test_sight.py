"""The builders of Sight."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attention.sight import block_sight, causal_sight, tree_sight

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


def seen(sight) -> list[list[int]]:
    """In-flight keys of each query, by their number within the lane."""
    words = np.asarray(sight.visible).astype("<i4").view(np.uint8)
    return [np.flatnonzero(row).tolist() for row in np.unpackbits(words, axis=1, bitorder="little")]


def test_tree_sight_names_ancestors_and_self():
    # Lane 0: a chunk of 3 with a fork behind it; lane 1 has nothing; lane 2: a root and two children.
    offsets = jnp.array([0, 6, 6, 9], jnp.int32)
    parents = jnp.array([-1, 0, 1, 2, 2, 4, -1, 0, 0, 7], jnp.int32)  # the last is padding
    positions = jnp.array([4, 5, 6, 7, 7, 8, 0, 1, 1, 0], jnp.int32)
    lanes = jnp.zeros((3, 1), jnp.int32), jnp.array([4, 0, 0], jnp.int32)
    whole = tree_sight(offsets, *lanes, positions, parents, max_queries=6)
    expected = [[0], [0, 1], [0, 1, 2], [0, 1, 2, 3], [0, 1, 2, 4], [0, 1, 2, 4, 5], [0], [0, 1], [0, 2]]
    assert seen(whole)[:9] == expected
    assert not bool(whole.causal.any())
    narrow = tree_sight(offsets, *lanes, positions, parents, max_queries=6, window=3)
    assert seen(narrow)[:9] == [
        [0], [0, 1], [0, 1, 2], [1, 2, 3], [1, 2, 4], [2, 4, 5], [0], [0, 1], [0, 2],
    ]  # fmt: skip
    np.testing.assert_array_equal(narrow.first_visible[:6], [2, 3, 4, 5, 5, 6])


def test_tree_sight_of_chains_is_the_causal_one_over_many_words():
    lengths = [70, 3, 41]
    offsets = jnp.asarray(np.cumsum([0, *lengths]), jnp.int32)
    parents = jnp.asarray(np.concatenate([np.arange(-1, n - 1) for n in lengths]), jnp.int32)
    positions = parents + 1
    sight = tree_sight(
        offsets, jnp.zeros((3, 1), jnp.int32), jnp.zeros((3,), jnp.int32), positions, parents, max_queries=80
    )
    assert sight.visible.shape == (114, 3)
    assert seen(sight) == [list(range(i + 1)) for n in lengths for i in range(n)]
