"""Drafters that know a part of the target's vocabulary: their columns are ids of the target."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_engine import SLOTS, VOCABULARY, Engine, config, tokens_of, weights

from jspec.coins import coupled_noise
from jspec.drafters.dflash import dflash, dflash_leaves
from jspec.drafters.dflash2 import dflash2
from jspec.drafters.dflash2_layers import Selector
from jspec.drafters.head_columns import head_columns

IDS = [1, 4, 5, 9, 14]


def started(make, **added) -> Engine:
    kind = config(draft_vocab_size=len(IDS), **added)
    leaves = dflash_leaves(kind, jnp.dtype(jnp.float32))
    params = tuple(
        jnp.asarray(IDS, jnp.int32) if leaf.path == "draft_ids" else value
        for leaf, value in zip(leaves, weights(kind), strict=True)
    )
    engine = Engine(make(kind), params, softcap=None)
    for slot in range(SLOTS):
        engine.admit(slot, slot + 1, tokens_of(slot, 8))
    engine.commit([0, 1, 2], [7, 7, 7])
    return engine


def test_best_id_among_those_that_are_drafted():
    engine = started(dflash)
    whole = engine.logits(0, 1, 2)
    assert engine.draft(0, 1, 2) == np.asarray(IDS)[np.argmax(whole[:, :, IDS], axis=2)].tolist()


def test_a_seed_adds_the_noise_of_the_ids():
    engine = started(dflash)
    engine.sampling = dataclasses.replace(
        engine.sampling,
        temperature=jnp.asarray([1.5] * SLOTS),
        seeds=jnp.asarray([3] * SLOTS, jnp.uint32),
        seeded=jnp.asarray([True] * SLOTS),
    )
    noise = coupled_noise(jnp.full((4,), 3, jnp.uint32), jnp.arange(8, 12, dtype=jnp.int32), VOCABULARY)
    noisy = (engine.logits(0)[0] / 1.5 + np.asarray(noise))[:, IDS]
    assert engine.draft(0) == [np.asarray(IDS)[np.argmax(noisy, axis=1)].tolist()]


def test_candidates_are_ids_of_the_target():
    engine = started(dflash2, selector=Selector(rank=3, top_k=3))
    proposal = engine.proposal(2)
    logits = engine.logits(2)[0][:, IDS]
    best = np.argsort(-logits, axis=1, kind="stable")[:, :3]
    assert proposal.q.ids[0].tolist() == np.asarray(IDS)[best].tolist()
    assert all(
        token in ids
        for token, ids in zip(proposal.tokens[0].tolist(), proposal.q.ids[0].tolist(), strict=True)
    )
    assert proposal.lengths.tolist() == [4, 0, 0, 0]


def test_a_target_whose_columns_do_not_say_its_logits_is_refused():
    kind = config(draft_vocab_size=2)
    with pytest.raises(
        ValueError, match="draft_vocab_size: expected None for a target whose logits are not linear"
    ):
        Engine(dflash(kind), weights(kind), softcap=2.0)


@pytest.mark.parametrize("size", [1, 17])
def test_sizes_that_cannot_be_are_refused(size):
    with pytest.raises(
        ValueError, match=f"draft_vocab_size: expected 2 to the vocabulary's 16, or None, got {size}"
    ):
        config(draft_vocab_size=size)


def test_head_columns_are_the_same_under_a_trace():
    head = jnp.arange(12.0).reshape(3, 4)
    ids = jnp.array([0, 3])
    traced = jax.jit(lambda head: head_columns(lambda hidden: hidden @ head, 3, ids))(head)
    np.testing.assert_array_equal(traced, head[:, ids])
