"""DFlash 2 against its definition in numpy: network, walk, draws, and what it says about them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_definition import dense_hidden, dense_logits, named_weights
from block_engine import MASK, SLOTS, VOCABULARY, Engine, config, tokens_of, weights

from jspec.coins import Purpose, coupled_noise, uniforms
from jspec.drafters.dflash import dflash
from jspec.drafters.dflash2 import dflash2
from jspec.drafters.dflash2_layers import Convolution, Selector
from jspec.drafters.dflash_init import init_dflash_params, upgrade_dflash_params
from jspec.drafters.dflash_net import DFlashConfig

CONVOLUTION, SELECTOR = Convolution(taps=2, group_size=3), Selector(rank=5, top_k=4)
TRANSFORM = dict(output_multiplier=1.7, final_softcap=3.0)
SEEDS = [11, 12, 13]


def kind_of(**changes) -> DFlashConfig:
    return config(**{**dict(convolution=CONVOLUTION, selector=SELECTOR), **changes})


def started(kind: DFlashConfig | None = None, draft_length: int | None = None) -> Engine:
    """Three requests of 8 tokens, ready to draft."""
    kind = kind_of() if kind is None else kind
    engine = Engine(dflash2(kind, draft_length=draft_length), weights(kind))
    for slot in range(SLOTS):
        engine.admit(slot, slot + 1, tokens_of(slot, 8))
    engine.commit([0, 1, 2], [7, 7, 7])
    return engine


def with_sampling(engine: Engine, temperature: list[float], seeded: list[bool]) -> Engine:
    engine.sampling = dataclasses.replace(
        engine.sampling,
        temperature=jnp.asarray(temperature),
        seeds=jnp.asarray(SEEDS, jnp.uint32),
        seeded=jnp.asarray(seeded),
    )
    return engine


def defined_walk(engine: Engine, slot: int, choose) -> tuple[list[int], list[list[int]]]:
    """Tokens and candidates by the definition; `choose(row, ids, scores)` gives an index."""
    kind = engine.drafter.config
    w = named_weights(kind, engine.params)
    hidden, logits = dense_hidden(kind, engine, slot, 7)[1:], dense_logits(kind, engine, slot, 7)
    logits = logits * kind.output_multiplier
    if kind.final_softcap is not None:
        logits = kind.final_softcap * np.tanh(logits / kind.final_softcap)
    before, tokens, candidates = int(engine.text.tokens[slot, 7]), [], []
    for row in range(len(hidden)):
        ids = np.argsort(-logits[row], kind="stable")[: kind.selector.top_k]
        gate = w["candidate_selector.predecessor_codebook"][before] * (
            hidden[row] @ w["candidate_selector.hidden_projection"]
        )
        scores = logits[row, ids] + w["candidate_selector.successor_codebook"][ids] @ gate
        before = int(ids[choose(row, ids, scores)])
        tokens.append(before)
        candidates.append(ids.tolist())
    return tokens, candidates


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(convolution=Convolution(taps=5, group_size=1)),
        dict(convolution=Convolution(taps=1, group_size=12), kinds=("full",), bias=True),
        dict(convolution=None),
        dict(window=1, is_causal=False, own_embedding=True),
    ],
    ids=str,
)
def test_forward_equals_the_definition(changes):
    engine = started(kind_of(**changes))
    hidden = engine.hidden(engine.params, engine.view, engine.state, jnp.asarray([2, 0, -1, -1]), engine.text)
    for lane, slot in enumerate((2, 0)):
        expected = dense_hidden(engine.drafter.config, engine, slot, 7)
        np.testing.assert_allclose(hidden[lane], expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("transform", [{}, TRANSFORM], ids=["plain", "transformed"])
def test_greedy_requests_take_the_best_candidate_after_the_one_before(transform):
    engine = started(kind_of(**transform))
    proposal = engine.proposal(2, 0)
    for lane, slot in enumerate((2, 0)):
        tokens, candidates = defined_walk(engine, slot, lambda row, ids, scores: np.argmax(scores))
        assert proposal.tokens[lane].tolist() == tokens
        assert proposal.q.ids[lane].tolist() == candidates
        one_hot = np.asarray(candidates) == np.asarray(tokens)[:, None]
        np.testing.assert_array_equal(proposal.q.probs[lane], one_hot)


def test_the_selector_changes_what_is_drafted():
    engine = started()
    unary = np.argmax(engine.logits(0, 1, 2), axis=2).tolist()
    assert engine.draft(0, 1, 2) != unary


@pytest.mark.parametrize("transform", [{}, TRANSFORM], ids=["plain", "transformed"])
def test_sampled_requests_draw_by_their_coins_and_say_from_what(transform):
    engine = with_sampling(started(kind_of(**transform)), [0.7, 1.3, 0.0], [False] * 3)
    proposal = engine.proposal(0, 1)
    coins = uniforms(jnp.asarray(SEEDS, jnp.uint32), jnp.full((3,), 7, jnp.int32), 4, Purpose.DRAFT)
    for slot, temperature in ((0, 0.7), (1, 1.3)):
        rows = []

        def drawn(row, ids, scores, slot=slot, temperature=temperature, rows=rows):
            p = np.exp((scores - scores.max()) / temperature)
            rows.append(p / p.sum())
            return int(np.sum(np.cumsum(rows[-1]) <= float(coins[slot, row])))

        tokens, candidates = defined_walk(engine, slot, drawn)
        assert proposal.tokens[slot].tolist() == tokens
        assert proposal.q.ids[slot].tolist() == candidates
        np.testing.assert_allclose(proposal.q.probs[slot], rows, atol=1e-5)


def test_requests_with_a_seed_draw_what_the_seed_draws_among_the_candidates():
    engine = with_sampling(started(), [1.5, 1.5, 0.0], [True, False, True])
    proposal = engine.proposal(0, 1, 2)
    noise = np.asarray(
        coupled_noise(jnp.full((4,), SEEDS[0], jnp.uint32), jnp.arange(8, 12, dtype=jnp.int32), VOCABULARY)
    )
    tokens, _ = defined_walk(engine, 0, lambda row, ids, scores: np.argmax(scores / 1.5 + noise[row, ids]))
    greedy, _ = defined_walk(engine, 2, lambda row, ids, scores: np.argmax(scores))
    assert proposal.tokens[0].tolist() == tokens
    assert proposal.tokens[2].tolist() == greedy
    probs = np.asarray(proposal.q.probs)
    for lane in (0, 2):  # deterministic: all mass on the token, beside a lane that draws
        assert sorted(set(probs[lane].ravel().tolist())) == [0.0, 1.0]
    assert 0 < probs[1].max() < 1


def test_q_holds_nothing_where_nothing_is_proposed():
    kind = kind_of(max_context=10)  # a block of 5 fits behind at most 5 tokens
    engine = Engine(dflash2(kind), weights(kind))
    engine.admit(0, 1, tokens_of(1, 6))
    engine.admit(1, 2, tokens_of(2, 7))
    engine.commit([0, 1], [5, 6])
    proposal = engine.proposal(1, -1, 0)
    assert proposal.lengths.tolist() == [0, 0, 4, 0]
    for lane in (0, 1, 3):
        assert (proposal.q.ids[lane] == -1).all() and (proposal.q.probs[lane] == 0).all()
    np.testing.assert_allclose(proposal.q.probs[2].sum(axis=1), 1)


def test_a_row_that_is_no_distribution_ends_the_proposal():
    engine = started()
    engine.target_params = (engine.target_params[0].at[MASK].set(jnp.nan), engine.target_params[1])
    proposal = engine.proposal(0)
    assert proposal.lengths.tolist() == [0] * 4
    assert (proposal.q.probs == 0).all() and (proposal.q.ids == -1).all()


def test_padding_lanes_and_order_change_nothing():
    engine = with_sampling(started(), [0.9, 0.0, 1.1], [False, False, True])
    one, other = engine.proposal(0, 1, 2), engine.proposal(-1, 2, 0, 1)
    order = np.asarray([2, 3, 1])  # lane of slot 0, 1, 2 in the other one
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(np.asarray(ours)[:3], np.asarray(theirs)[order])


def test_a_shorter_draft_has_the_same_first_tokens():
    for temperature in ([0.0] * 3, [0.8] * 3):
        long, short = started(), started(draft_length=2)
        drafts = [with_sampling(e, temperature, [False] * 3).draft(0, 1, 2) for e in (long, short)]
        assert drafts[1] == [draft[:2] for draft in drafts[0]]


def test_state_is_that_of_dflash():
    plain, more = config(), kind_of()
    engine = started(more)
    named = named_weights(more, engine.params)
    leaves = named_weights(plain, weights(plain))
    other = Engine(dflash(plain), tuple(jnp.asarray(named[name], jnp.float32) for name in leaves))
    other.admit(1, 2, tokens_of(1, 8))
    other.commit([1], [7])
    for row, expected in zip(engine.rows(1), other.rows(1), strict=True):
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("seeded", [False, True], ids=["greedy", "seeded"])
def test_fresh_dflash2_on_dflash_weights_drafts_the_same_tokens(dtype, seeded):
    plain, more = config(bias=True), kind_of(bias=True)
    params = tuple(
        (array + 0.3 * jax.random.normal(key, array.shape)).astype(array.dtype)
        for array, key in zip(
            init_dflash_params(plain, jax.random.key(0), dtype),
            jax.random.split(jax.random.key(1), len(weights(plain))),
            strict=True,
        )
    )
    upgraded = upgrade_dflash_params(plain, params, more, jax.random.key(2), dtype)
    drafts = []
    for drafter, own in ((dflash(plain), params), (dflash2(more), upgraded)):
        engine = Engine(drafter, own)
        for slot in range(SLOTS):
            engine.admit(slot, slot + 1, tokens_of(slot, 8))
        engine.commit([0, 1, 2], [7, 7, 7])
        if seeded:
            # The seed's draw is among the candidates here: the temperature is low.
            with_sampling(engine, [0.05] * 3, [True] * 3)
        drafts.append(engine.draft(0, 1, 2))
        hidden = engine.hidden(own, engine.view, engine.state, jnp.asarray([0, 1, 2, -1]), engine.text)
        drafts.append(np.asarray(hidden[:3]).tolist())
    assert drafts[0] == drafts[2]
    assert drafts[1] == drafts[3]  # even the hidden states, bit for bit


def test_one_trace_serves_every_request():
    engine = started(kind_of(convolution=Convolution(taps=3, group_size=2)))
    for temperature, seeded in (([0.0] * 3, False), ([1.0] * 3, False), ([1.0] * 3, True)):
        with_sampling(engine, temperature, [seeded] * 3).proposal(0, 1)
        engine.commit([0, 1], [1, 1])
    assert engine.propose._cache_size() == 1


def test_plain_configs_need_another_drafter():
    with pytest.raises(ValueError, match=r"config: expected a drafter with a candidate selector.*dflash\(\)"):
        dflash2(config(convolution=CONVOLUTION))
    with pytest.raises(ValueError, match=r"draft_length: expected 1 to 4 .* got 5"):
        dflash2(kind_of(), draft_length=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            dict(convolution=Convolution(taps=6, group_size=3)),
            "convolution.taps: expected 1 to the block's 5",
        ),
        (dict(convolution=Convolution(taps=0, group_size=3)), "convolution.taps: .* got 0"),
        (
            dict(convolution=Convolution(taps=2, group_size=5)),
            "convolution.group_size: expected a divisor of the hidden size 12, got 5",
        ),
        (dict(selector=Selector(rank=0, top_k=4)), "selector.rank: expected at least 1, got 0"),
        (
            dict(selector=Selector(rank=2, top_k=17)),
            "selector.top_k: expected 1 to the 16 ids that are drafted, got 17",
        ),
        (dict(draft_vocab_size=3), "selector.top_k: expected 1 to the 3 ids that are drafted, got 4"),
        (dict(anchor_predicts=True), "anchor_predicts: expected False with a candidate selector"),
    ],
)
def test_a_config_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        kind_of(**change)
