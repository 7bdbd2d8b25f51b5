"""Continuations as one tree, against a trie made in Python."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.ngram_trie import trie

tree_of = jax.jit(trie)


def built(rows):
    """[(token, parent)] of a lane's continuations, in the order in which they add nodes."""
    nodes, known = [], {(): 0}
    for row in rows:
        for length in range(1, len(row) + 1):
            path = tuple(row[:length])
            if path not in known:
                nodes.append((row[length - 1], known[path[:-1]]))
                known[path] = len(nodes)
    return nodes


def drafted(lanes, count, depth):
    tokens, lengths = (
        np.full((len(lanes), count, depth), 7, np.int32),
        np.zeros((len(lanes), count), np.int32),
    )
    for lane, rows in enumerate(lanes):
        for index, row in enumerate(rows):
            tokens[lane, index, : len(row)] = row
            lengths[lane, index] = len(row)
    out = tree_of(jnp.asarray(tokens), jnp.asarray(lengths))
    assert (out.tokens.shape, out.depth) == ((len(lanes), count * depth), depth)
    return [
        list(zip(tokens[:length], parents[:length], strict=True))
        for tokens, parents, length in zip(
            out.tokens.tolist(), out.parents.tolist(), out.lengths.tolist(), strict=True
        )
    ]


def test_equal_beginnings_are_shared():
    assert drafted([[[1, 2], [1, 3], [4]]], 3, 2) == [[(1, 0), (2, 1), (3, 1), (4, 0)]]


@pytest.mark.parametrize("seed", range(5))
def test_tree_holds_every_continuation_once(seed):
    rng = np.random.default_rng(seed)
    lanes = [[rng.integers(0, 3, rng.integers(0, 5)).tolist() for _ in range(4)] for _ in range(8)]
    assert drafted(lanes, 4, 4) == [built(rows) for rows in lanes]
