"""A tree over the candidates of a DFlash block."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_engine import VOCABULARY, Engine, config, tokens_of, weights

from jspec.drafters.dflash import dflash
from jspec.drafters.dflash_tree import dflash_tree
from jspec.drafters.tree_shape import chain_shape, dynamic_tree, static_tree

CONFIG = config()
PARAMS = weights(CONFIG)


def ready(shape):
    engine = Engine(dflash_tree(CONFIG, shape), PARAMS)
    engine.admit(0, 1, tokens_of(1, 9))
    assert engine.commit([0], [8])[0] == shape.draft_length
    return engine


def paths_of(proposal):
    """Ids from the anchor down to every draft token."""
    paths = []
    for token, parent in zip(proposal.tokens[0].tolist(), proposal.parents[0].tolist(), strict=True):
        paths.append((*(paths[parent - 1] if parent else ()), token))
    return paths


def test_best_tokens_by_the_product_of_their_probabilities():
    engine = ready(dynamic_tree(width=4, depth=3, draft_length=12, beam=12))
    proposal = engine.proposal(0)
    probs = np.asarray(jax.nn.softmax(jnp.asarray(engine.logits(0)[0]), axis=1), np.float64)
    best = np.argsort(-probs, axis=1)[:, :4].tolist()
    scores = {
        path: math.prod(probs[place][token] for place, token in enumerate(path))
        for depth in (1, 2, 3)
        for path in itertools.product(*best[:depth])
    }
    expected = sorted(scores, key=lambda path: -scores[path])[:12]
    assert sorted(paths_of(proposal)) == sorted(expected)
    assert proposal.lengths[0] == 12
    assert proposal.depth == 3


def test_first_places_of_a_chain_are_the_drafters_own():
    engine = ready(chain_shape(3))
    plain = Engine(dflash(CONFIG, draft_length=3), PARAMS)
    plain.admit(0, 1, tokens_of(1, 9))
    plain.commit([0], [8])
    assert engine.proposal(0).parents is None
    assert engine.draft(0) == plain.draft(0)


def test_place_that_is_no_distribution_ends_the_tree():
    engine = ready(static_tree([[0], [1], [0, 0], [1, 1], [0, 0, 0]]))
    whole = paths_of(engine.proposal(0))
    real, rows = engine.drafter.draft_rows, []

    class Broken(type(engine.drafter)):
        def draft_rows(self, *arguments):
            hidden, logits = real(*arguments)
            rows.append(logits.shape[1])
            return hidden, logits.at[:, 1].set(jnp.nan)

    broken = Broken(config=CONFIG, draft_length=5, shape=engine.drafter.shape)
    lanes = jnp.asarray([0, -1, -1, -1], jnp.int32)
    proposal = jax.jit(broken.draft)(
        engine.params, engine.view, engine.state, lanes, engine.text, engine.sampling
    )
    assert rows == [3]
    assert proposal.lengths.tolist() == [2, 0, 0, 0]
    assert paths_of(proposal)[:2] == whole[:2]


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (dynamic_tree(width=2, depth=5, draft_length=8), "tree: expected a depth of at most 4 .*, got 5"),
        (
            dynamic_tree(width=VOCABULARY + 1, depth=1, draft_length=3),
            "tree: expected a width of at most 16 .*, got 17",
        ),
    ],
)
def test_tree_that_the_block_does_not_hold_is_refused(shape, message):
    with pytest.raises(ValueError, match=message):
        dflash_tree(CONFIG, shape)
