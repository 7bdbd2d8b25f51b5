"""DFlash against a dense forward pass in numpy, and its state against a clean rebuild."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_definition import dense_logits
from block_engine import MASK, SLOTS, VOCABULARY, Engine, config, tokens_of, weights

from jspec.coins import coupled_noise
from jspec.drafters.dflash import dflash
from jspec.drafters.dflash2_layers import Selector


@pytest.mark.parametrize(
    "options",
    [
        {},
        dict(kinds=("full",), bias=True),
        dict(kinds=("window", "full", "window"), window=1),
        dict(window=100),
        dict(is_causal=True),
        dict(is_causal=False),
        dict(is_causal=False, window=100),
        dict(own_embedding=True, block_size=2),
    ],
    ids=str,
)
def test_forward_equals_the_definition(options):
    kind = config(**options)
    engine = Engine(dflash(kind), weights(kind))
    for slot, length in ((0, 11), (2, 2)):
        engine.admit(slot, slot + 1, tokens_of(slot, length))
    engine.commit([0, 2], [10, 1])
    logits = engine.logits(2, 0)
    np.testing.assert_allclose(logits[0], dense_logits(kind, engine, 2, 1), atol=2e-5)
    np.testing.assert_allclose(logits[1], dense_logits(kind, engine, 0, 10), atol=2e-5)


def test_drafts_the_best_tokens():
    engine = Engine(dflash(config()), weights(config()))
    engine.admit(0, 1, tokens_of(1, 8))
    engine.commit([0], [7])
    assert engine.draft(0) == np.argmax(engine.logits(0), axis=2).tolist()


@pytest.mark.parametrize("split", [[9], [1] * 9, [4, 5], [5, 4], [3, 1, 1, 4], [8, 1]], ids=str)
def test_state_is_the_same_however_the_tokens_were_committed(split):
    drafter, params = dflash(config()), weights(config())
    rebuilt, stepped = Engine(drafter, params), Engine(drafter, params, page_order=1)
    for engine in (rebuilt, stepped):
        engine.admit(1, 5, tokens_of(5, 10))
    rebuilt.commit([1], [9])
    for count in split:
        ready = stepped.commit([1], [count], rejected=3)
    assert ready == [drafter.draft_length]
    for row, expected in zip(stepped.rows(1), rebuilt.rows(1), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-6)
    assert stepped.draft(1) == rebuilt.draft(1)


def test_rejected_and_padding_rows_are_nowhere_in_the_pool():
    engine = Engine(dflash(config()), weights(config()))
    engine.admit(0, 1, tokens_of(1, 8))
    engine.commit([-1, 0], [2, 5], rejected=4, fill=1e6)
    engine.commit([0, -1], [2, 0], rejected=2, fill=np.nan)
    used = np.asarray(engine.state.pages.v)
    assert np.isfinite(used).all() and np.abs(used).max() < 1e3
    assert np.count_nonzero(np.any(used != 0, axis=(0, 2, 4))) == 7  # as many rows as tokens


def test_padding_lanes_change_nothing():
    engine = Engine(dflash(config()), weights(config()))
    engine.admit(1, 1, tokens_of(1, 8))
    engine.commit([1], [7])
    alone = engine.draft(1)
    poisoned = jax.tree.map(lambda pool: pool.at[:].set(jnp.nan), engine.state)
    table = engine.cache.groups[0].page_table[1]
    engine.state = jax.tree.map(lambda new, old: new.at[:, table].set(old[:, table]), poisoned, engine.state)
    assert engine.draft(-1, 1, -1, -1) == [[], alone[0], [], []]


def test_lanes_may_come_in_any_order():
    drafter, params = dflash(config()), weights(config())
    one, other = Engine(drafter, params), Engine(drafter, params)
    for engine in (one, other):
        for slot in range(SLOTS):
            engine.admit(slot, slot + 1, tokens_of(slot, 6 + slot))
    one.commit([0, 1, 2], [5, 6, 7], rejected=1)
    other.commit([2, -1, 0, 1], [7, 0, 5, 6], rejected=2)
    drafts = one.draft(0, 1, 2)
    assert other.draft(1, 2, -1, 0) == [drafts[1], drafts[2], [], drafts[0]]
    for slot in range(SLOTS):
        for row, expected in zip(other.rows(slot), one.rows(slot), strict=True):
            np.testing.assert_allclose(row, expected, atol=1e-6)


def test_second_shorter_request_on_a_slot_is_as_fresh():
    drafter, params = dflash(config()), weights(config())
    fresh, used = Engine(drafter, params), Engine(drafter, params)
    used.admit(0, 1, tokens_of(1, 18))
    used.commit([0], [17])
    used.draft(0)
    for engine in (fresh, used):
        engine.admit(0, 2, tokens_of(2, 4))
        assert engine.draft(0) == [[]]  # its prompt is not committed yet
        engine.commit([0], [3])
    assert used.draft(0) == fresh.draft(0)


def test_neighbour_that_never_gets_anything_accepted_disturbs_nobody():
    drafter, params = dflash(config()), weights(config())
    alone, beside = Engine(drafter, params), Engine(drafter, params)
    for engine in (alone, beside):
        engine.admit(0, 1, tokens_of(1, 12))
    beside.admit(1, 2, tokens_of(2, 12))
    for count in (4, 3, 4):
        alone.commit([0], [count], rejected=1)
        beside.commit([1, 0], [1, count], rejected=4)
    assert beside.draft(1, 0)[1] == alone.draft(0)[0]


def test_a_shorter_draft_has_the_same_first_tokens():
    kind, params = config(), weights(config())
    drafts = []
    for length in (None, 2):
        engine = Engine(dflash(kind, draft_length=length), params)
        engine.admit(0, 1, tokens_of(1, 8))
        assert engine.commit([0], [7]) == [length or 4]
        drafts.append(engine.draft(0)[0])
    assert drafts[1] == drafts[0][:2]


def test_past_its_own_window_a_slot_drafts_nothing_and_others_go_on():
    kind = config(max_context=10)  # a block of 5 fits behind at most 5 tokens
    engine = Engine(dflash(kind), weights(kind))
    engine.admit(0, 1, tokens_of(1, 6))
    engine.admit(1, 2, tokens_of(2, 7))
    assert engine.commit([0, 1], [5, 6]) == [4, 0]
    assert [len(row) for row in engine.draft(0, 1)] == [4, 0]


def test_nothing_is_drafted_before_the_whole_prompt_is_committed():
    engine = Engine(dflash(config()), weights(config()))
    engine.admit(0, 1, tokens_of(1, 9))
    assert engine.commit([0], [4]) == [0]
    assert engine.draft(0) == [[]]
    assert engine.commit([0], [4]) == [4]


def test_requests_with_a_seed_draft_what_the_seed_would_draw():
    engine = Engine(dflash(config()), weights(config()))
    for slot in range(SLOTS):
        engine.admit(slot, slot + 1, tokens_of(slot, 8))
    engine.commit([0, 1, 2], [7, 7, 7])
    greedy = engine.draft(0, 1, 2)
    engine.sampling = dataclasses.replace(
        engine.sampling,
        temperature=jnp.asarray([0.0, 1.5, 1.5]),
        seeds=jnp.asarray([3, 3, 4], jnp.uint32),
        seeded=jnp.asarray([True, True, False]),
    )
    positions = jnp.arange(8, 12, dtype=jnp.int32)
    noise = coupled_noise(jnp.full((4,), 3, jnp.uint32), positions, VOCABULARY)
    drawn = np.argmax(engine.logits(1)[0] / 1.5 + np.asarray(noise), axis=1).tolist()
    assert drawn != greedy[1]
    assert engine.draft(2, 1, 0) == [greedy[2], drawn, greedy[0]]


def test_rows_that_are_not_numbers_are_not_proposed():
    engine = Engine(dflash(config()), weights(config()))
    engine.admit(0, 1, tokens_of(1, 4))
    engine.commit([0], [3])
    engine.target_params = (engine.target_params[0].at[MASK].set(jnp.nan), engine.target_params[1])
    assert engine.draft(0) == [[]]


def test_one_trace_serves_every_length():
    engine = Engine(dflash(config()), weights(config()))
    engine.admit(0, 1, tokens_of(1, 12))
    for _ in range(4):
        engine.commit([0], [2])
        engine.draft(0)
    assert engine.absorb._cache_size() == engine.propose._cache_size() == 1


def test_features_are_named_in_the_order_of_the_checkpoint():
    assert dflash(config()).features == ("embedding", "layer.2")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(num_target_layers=8), "layers 8, not 6"),
        (dict(target_hidden_size=10), "hidden size of a captured state 10, not 12"),
        (
            dict(target_layer_ids=(1, 6), num_target_layers=None),
            r"states \[6\] of a target that has layers 0 to 5",
        ),
    ],
)
def test_another_target_is_refused_with_both_sides_named(change, message):
    kind = dataclasses.replace(config(), **change)
    with pytest.raises(ValueError, match=message) as error:
        Engine(dflash(kind), weights(kind))
    assert "arrays, 6 layers" in str(error.value) and kind.identity in str(error.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [(dict(vocab_size=17), "vocabulary 17, not 16"), (dict(hidden_size=8), "hidden size 8, not 12")],
)
def test_other_sizes_are_refused(change, message):
    kind = config()
    kind = dataclasses.replace(kind, decoder=dataclasses.replace(kind.decoder, **change))
    with pytest.raises(ValueError, match=message):
        Engine(dflash(kind), weights(kind))


def test_params_of_another_drafter_are_refused():
    with pytest.raises(ValueError, match="params: expected 25 arrays"):
        Engine(dflash(config()), weights(config(kinds=("full",))))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(block_size=1), "block_size: expected at least 2"),
        (dict(mask_token_id=16), "mask_token_id: expected 0 to 15, got 16"),
        (dict(target_layer_ids=()), "target_layer_ids: expected some ids"),
        (dict(target_layer_ids=(-2,)), "target_layer_ids: expected some ids from -1 on"),
        (dict(output_multiplier=0.0), "output_multiplier: expected a number above 0, got 0.0"),
        (dict(final_softcap=-1.0), "final_softcap: expected a number above 0 or None, got -1.0"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config(), **change)


@pytest.mark.parametrize("length", [0, 5])
def test_draft_length_must_fit_the_block(length):
    with pytest.raises(ValueError, match=rf"draft_length: expected 1 to 4 .* got {length}"):
        dflash(config(), draft_length=length)


def test_a_selector_needs_another_drafter():
    with pytest.raises(ValueError, match=r"config: expected a drafter without a candidate selector.*dflash2"):
        dflash(config(selector=Selector(rank=2, top_k=3)))


def test_anchor_row_may_predict_the_first_token():
    kind = config(anchor_predicts=True)
    drafter, params = dflash(kind), weights(kind)
    assert drafter.draft_length == 5
    engine = Engine(drafter, params)
    engine.admit(0, 1, tokens_of(1, 8))
    assert engine.commit([0], [7]) == [5]
    hidden = engine.hidden(params, engine.view, engine.state, jnp.asarray([0, -1, -1, -1]), engine.text)
    expected = jnp.argmax(engine.view.logits(hidden[0]), axis=1).tolist()
    assert engine.draft(0) == [expected]


def test_a_tiny_temperature_leaves_the_draw_of_a_seed_alone():
    engine = Engine(dflash(config()), weights(config()))
    engine.admit(0, 1, tokens_of(1, 8))
    engine.commit([0], [7])
    greedy = engine.draft(0)
    engine.sampling = dataclasses.replace(
        engine.sampling,
        temperature=jnp.asarray([1e-20] * SLOTS),
        seeds=jnp.full((SLOTS,), 3, jnp.uint32),
        seeded=jnp.asarray([True] * SLOTS),
    )
    assert engine.draft(0) == greedy
