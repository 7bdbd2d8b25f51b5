"""The drafter that proposes nothing."""

import jax
import jax.numpy as jnp

from jspec.drafters.plain import plain
from jspec.drafters.protocol import Committed, Text


def test_has_no_state_and_proposes_nothing(view, greedy):
    drafter = plain()
    state = drafter.init((), view, 3)
    assert jax.tree.leaves(state) == []
    lanes = jnp.asarray([2, -1])
    text = Text(tokens=jnp.zeros((3, 8), jnp.int32), lengths=jnp.asarray([3, 1, 2]))
    proposal = drafter.draft((), view, state, lanes, text, greedy)
    assert proposal.tokens.shape == (2, 0)
    assert proposal.lengths.tolist() == [0, 0]
    committed = Committed(
        features=jnp.zeros((1, 0)),
        positions=jnp.zeros((1,), jnp.int32),
        path=jnp.asarray([[0], [-1]]),
        context_lengths=jnp.asarray([1, 2]),
        is_first=jnp.asarray([False, False]),
    )
    state, ready = drafter.absorb((), view, state, lanes, text, committed)
    assert jax.tree.leaves(state) == []
    assert ready.tolist() == [0, 0]
