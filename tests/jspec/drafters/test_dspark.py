"""DSpark and Domino against definitions in numpy: heads, walks, draws, confidence, and what they say about them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_definition import dense_hidden, named_weights
from block_engine import SLOTS, VOCABULARY, Engine, config, tokens_of, weights

from jspec.coins import Purpose, coupled_noise, uniforms
from jspec.drafters.dflash import dflash, dflash_net
from jspec.drafters.dflash2_layers import Selector
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.domino import domino
from jspec.drafters.domino_head import Gru
from jspec.drafters.dspark import dspark
from jspec.drafters.dspark_heads import Confidence, Markov
from jspec.drafters.sequential import correction, teacher_forced
from jspec.round import Dense, Sparse

SEEDS = [11, 12, 13]
GATED, RNN = Markov(rank=3, kind="gated"), Markov(rank=3, kind="rnn")
HEADS = {
    "vanilla": dict(head=Markov(rank=3), confidence=Confidence(reads_token=True), anchor_predicts=True),
    "gated": dict(head=GATED, confidence=Confidence(reads_token=False), anchor_predicts=True),
    "rnn": dict(head=RNN, confidence=Confidence(reads_token=True), anchor_predicts=True),
    "rnn, row 0 dropped": dict(head=RNN),
    "confidence alone": dict(confidence=Confidence(reads_token=False), anchor_predicts=True),
    "gru": dict(head=Gru(size=5, rank=3), anchor_predicts=True),
    "gru, row 0 dropped": dict(head=Gru(size=5, rank=3, first_corrected=2)),
}


def kind_of(name: str = "rnn", **changes) -> DFlashConfig:
    return config(**{**HEADS[name], **changes})


def started(kind: DFlashConfig, softcap: float | None = 2.0, **options) -> Engine:
    """Three requests of 8 tokens, ready to draft."""
    make = domino if isinstance(kind.head, Gru) else dspark
    engine = Engine(make(kind, **options), weights(kind), softcap=softcap)
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


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def defined_walk(engine: Engine, slot: int, choose) -> tuple[list[int], np.ndarray, list[float]]:
    """Tokens, corrected logits and confidence logits by the definition; `choose(row, scores)` gives an id."""
    kind = engine.drafter.config
    w = named_weights(kind, engine.params)
    hidden = dense_hidden(kind, engine, slot, 7)[0 if kind.anchor_predicts else 1 :]
    base = hidden @ np.asarray(engine.target_params[1], np.float64)
    if engine.target.softcap is not None:
        base = engine.target.softcap * np.tanh(base / engine.target.softcap)
    embedding = np.asarray(engine.target_params[0], np.float64) * engine.target.embedding_scale
    before, tokens, rows, confidences = int(engine.text.tokens[slot, 7]), [], [], []
    state = np.zeros(getattr(kind.head, "size", getattr(kind.head, "rank", 0)))
    for row, h in enumerate(hidden):
        latent, e = None, None
        match kind.head:
            case Gru(size=size):
                reset, update, _ = np.split(
                    embedding[before] @ w["head.gru_input"] + state @ w["head.gru_state"], 3
                )
                ni, ns = (
                    embedding[before] @ w["head.gru_input"][:, 2 * size :],
                    state @ w["head.gru_state"][:, 2 * size :],
                )
                new = np.tanh(ni + sigmoid(reset) * ns)
                state = (1 - sigmoid(update)) * new + sigmoid(update) * state
                mixed = np.concatenate([h, state]) @ w["head.mix"]
                latent = mixed * sigmoid(mixed) * (row >= kind.head.first_corrected)
            case Markov(kind=form):
                e = w["head.embedding"][before]
                if form == "vanilla":
                    latent = e
                elif form == "gated":
                    latent = sigmoid(np.concatenate([h, e]) @ w["head.mix"] + w["head.mix_bias"]) * e
                else:
                    mixed = np.concatenate([state, e, h]) @ w["head.mix"] + w["head.mix_bias"]
                    gate, candidate, out = np.split(mixed, 3)
                    state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
                    latent = np.tanh(out)
        scores = base[row] if latent is None else base[row] + latent @ w["head.output"]
        if kind.confidence is not None:
            seen = np.concatenate([h, e]) if kind.confidence.reads_token else h
            confidences.append(float(seen @ w["confidence_head.weight"][:, 0] + w["confidence_head.bias"][0]))
        before = int(choose(row, scores))
        tokens.append(before)
        rows.append(scores)
    return tokens, np.stack(rows), confidences


def best(row: int, scores: np.ndarray) -> int:
    return int(np.argmax(scores))


@pytest.mark.parametrize("name", HEADS)
def test_greedy_requests_take_the_best_token_after_the_ones_before(name):
    engine = started(kind_of(name))
    proposal = engine.proposal(2, 0)
    length = engine.drafter.draft_length
    assert length == (5 if engine.drafter.config.anchor_predicts else 4)
    assert proposal.lengths.tolist() == [length, length, 0, 0]
    for lane, slot in enumerate((2, 0)):
        tokens, _, confidences = defined_walk(engine, slot, best)
        assert proposal.tokens[lane].tolist() == tokens
        np.testing.assert_array_equal(proposal.q.probs[lane], np.eye(VOCABULARY)[tokens])
        if confidences:
            np.testing.assert_allclose(proposal.confidence[lane], sigmoid(np.asarray(confidences)), atol=1e-5)
    if engine.drafter.config.confidence is None:
        assert proposal.confidence is None


@pytest.mark.parametrize("name", HEADS)
def test_sampled_requests_draw_by_their_coins_and_say_from_what(name):
    engine = with_sampling(started(kind_of(name)), [0.7, 1.3, 0.0], [False] * 3)
    proposal = engine.proposal(0, 1, 2)
    coins = uniforms(jnp.asarray(SEEDS, jnp.uint32), jnp.full((3,), 7, jnp.int32), 5, Purpose.DRAFT)
    for slot, temperature in ((0, 0.7), (1, 1.3)):
        rows = []

        def drawn(row, scores, slot=slot, temperature=temperature, rows=rows):
            p = np.exp((scores - scores.max()) / temperature)
            rows.append(p / p.sum())
            return np.sum(np.cumsum(rows[-1]) <= float(coins[slot, row]))

        tokens, _, _ = defined_walk(engine, slot, drawn)
        assert proposal.tokens[slot].tolist() == tokens
        np.testing.assert_allclose(proposal.q.probs[slot], rows, atol=1e-5)
    # A greedy request beside them stays exactly greedy.
    greedy, _, _ = defined_walk(engine, 2, best)
    assert proposal.tokens[2].tolist() == greedy
    np.testing.assert_array_equal(proposal.q.probs[2], np.eye(VOCABULARY)[greedy])


@pytest.mark.parametrize("name", ["gated", "rnn", "gru"])
def test_known_tokens_give_the_logits_that_they_were_drawn_from(name):
    engine = with_sampling(started(kind_of(name)), [0.9] * 3, [False] * 3)
    kind, lanes = engine.drafter.config, jnp.arange(3, dtype=jnp.int32)
    proposal = engine.proposal(0, 1, 2)
    net = dflash_net(kind, engine.params)
    hidden, base = engine.drafter.draft_rows(engine.params, engine.view, engine.state, lanes, engine.text)
    before = jnp.concatenate([engine.text.tokens[:, 7:8], proposal.tokens[:3, :-1]], axis=1)
    latents = teacher_forced(net.head, hidden, net.head.read(before, engine.view.embed))
    scores = base + correction(latents, net.head.output[...])
    np.testing.assert_allclose(proposal.q.probs[:3], jax.nn.softmax(scores / 0.9, axis=-1), atol=1e-5)


def test_requests_with_a_seed_draw_what_the_seed_draws():
    engine = with_sampling(started(kind_of()), [1.5, 1.5, 0.0], [True, False, True])
    proposal = engine.proposal(0, 1, 2)
    noise = np.asarray(
        coupled_noise(jnp.full((5,), SEEDS[0], jnp.uint32), jnp.arange(8, 13, dtype=jnp.int32), VOCABULARY)
    )
    tokens, _, _ = defined_walk(engine, 0, lambda row, scores: np.argmax(scores / 1.5 + noise[row]))
    assert proposal.tokens[0].tolist() == tokens
    np.testing.assert_array_equal(proposal.q.probs[0], np.eye(VOCABULARY)[tokens])
    assert 0 < np.max(proposal.q.probs[1]) < 1


@pytest.mark.parametrize("name", ["rnn", "gru"])
def test_a_part_of_the_vocabulary_is_drafted_by_its_ids(name):
    ids = np.asarray([1, 2, 5, 6, 9, 12])
    kind = kind_of(name, draft_vocab_size=len(ids))
    params = weights(kind)
    place = list(named_weights(kind, params)).index("draft_ids")
    params = (*params[:place], jnp.asarray(ids, jnp.int32), *params[place + 1 :])
    make = domino if name == "gru" else dspark
    engine = Engine(make(kind), params, softcap=None)
    for slot in range(SLOTS):
        engine.admit(slot, slot + 1, tokens_of(slot, 8))
    engine.commit([0, 1, 2], [7, 7, 7])
    with_sampling(engine, [0.8, 0.0, 1.2], [False, False, True])
    proposal = engine.proposal(0, 1, 2)
    assert isinstance(proposal.q, Dense) and proposal.q.ids.tolist() == ids.tolist()
    assert set(np.asarray(proposal.tokens[:3]).ravel()) <= set(ids.tolist())
    head = np.asarray(engine.target_params[1])
    whole = (engine.target_params[0], jnp.asarray(head[:, ids]))
    narrow = Engine(make(kind), params, softcap=None)  # its walk by the definition, on the head's columns
    narrow.text, narrow.requests, narrow.target_params = engine.text, engine.requests, whole
    column = {int(i): c for c, i in enumerate(ids)}
    walked, _, _ = defined_walk_of_columns(narrow, 1, ids)
    assert [column[t] for t in proposal.tokens[1].tolist()] == walked


def defined_walk_of_columns(engine: Engine, slot: int, ids: np.ndarray):
    """As `defined_walk`, greedy, where a row's scores have the columns of `ids`."""
    columns = []

    def pick(row, scores):
        columns.append(int(np.argmax(scores)))
        return ids[columns[-1]]

    _, rows, confidences = defined_walk(engine, slot, pick)
    return columns, rows, confidences


def test_a_pool_bounds_what_is_drafted():
    kind = kind_of("gru")
    whole = with_sampling(started(kind), [0.0, 1.1, 0.8], [False] * 3)
    few = with_sampling(started(kind, candidate_pool=6), [0.0, 1.1, 0.8], [False, False, True])
    proposal = few.proposal(0, 1, 2)
    assert isinstance(proposal.q, Sparse) and proposal.q.ids.shape == (4, 5, 6)
    _, logits = few.drafter.draft_rows(
        few.params, few.view, few.state, jnp.arange(3, dtype=jnp.int32), few.text
    )
    for lane in range(3):
        pool = np.sort(np.argsort(-np.asarray(logits[lane]).max(0), kind="stable")[:6])
        np.testing.assert_array_equal(proposal.q.ids[lane], np.tile(pool, (5, 1)))
        assert set(proposal.tokens[lane].tolist()) <= set(pool.tolist())
        np.testing.assert_allclose(proposal.q.probs[lane].sum(axis=1), 1, rtol=1e-6)
    # The first row is not corrected, and its best id is always in the pool.
    assert proposal.tokens[0, 0] == whole.proposal(0).tokens[0, 0]


def test_q_holds_nothing_where_nothing_is_proposed():
    kind = kind_of(max_context=10)  # a block of 5 fits behind at most 5 tokens
    engine = Engine(dspark(kind), weights(kind))
    engine.admit(0, 1, tokens_of(1, 6))
    engine.admit(1, 2, tokens_of(2, 7))
    engine.commit([0, 1], [5, 6])
    for temperature in ([0.0] * 3, [1.0] * 3):
        proposal = with_sampling(engine, temperature, [False] * 3).proposal(1, -1, 0)
        assert proposal.lengths.tolist() == [0, 0, 5, 0]
        for lane in (0, 1, 3):
            assert (proposal.q.probs[lane] == 0).all()
        np.testing.assert_allclose(proposal.q.probs[2].sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_no_distribution_ends_the_proposal(temperature):
    engine = with_sampling(started(kind_of()), [temperature] * 3, [False] * 3)
    named = list(named_weights(engine.drafter.config, engine.params))
    place = named.index("head.embedding")
    first = int(engine.proposal(0).tokens[0, 1])
    broken = engine.params[place].at[first].set(jnp.nan)  # what follows draft token 1 cannot be drafted
    engine.params = (*engine.params[:place], broken, *engine.params[place + 1 :])
    proposal = engine.proposal(0)
    assert proposal.lengths[0] == 2
    assert (proposal.q.probs[0, 2:] == 0).all()
    assert (np.asarray(proposal.q.probs[0, :2]).sum(axis=1) > 0.99).all()


def test_padding_lanes_and_order_change_nothing():
    engine = with_sampling(started(kind_of()), [0.9, 0.0, 1.1], [False, False, True])
    one, other = engine.proposal(0, 1, 2), engine.proposal(-1, 2, 0, 1)
    order = np.asarray([2, 3, 1])  # lane of slot 0, 1, 2 in the other one
    for ours, theirs in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(np.asarray(ours)[:3], np.asarray(theirs)[order], atol=1e-6)


def test_a_shorter_draft_has_the_same_first_tokens():
    for temperature in ([0.0] * 3, [0.8] * 3):
        long, short = started(kind_of()), started(kind_of(), draft_length=2)
        drafts = [with_sampling(e, temperature, [False] * 3).draft(0, 1, 2) for e in (long, short)]
        assert drafts[1] == [draft[:2] for draft in drafts[0]]


def test_state_is_that_of_dflash_after_any_rounds():
    plain, more = config(anchor_predicts=True), kind_of()
    engine = Engine(dspark(more), weights(more))
    engine.admit(1, 2, tokens_of(1, 16))
    for count in (3, 1, 4, 2):
        engine.commit([1], [count], rejected=2)
    named = named_weights(more, engine.params)
    leaves = named_weights(plain, weights(plain))
    clean = Engine(dflash(plain), tuple(jnp.asarray(named[name], jnp.float32) for name in leaves))
    clean.admit(1, 2, tokens_of(1, 16))
    clean.commit([1], [10])
    for row, expected in zip(engine.rows(1), clean.rows(1), strict=True):
        np.testing.assert_allclose(row, expected, atol=1e-5)


def test_one_trace_serves_every_request():
    engine = started(kind_of("vanilla"))
    for temperature, seeded in (([0.0] * 3, False), ([1.0] * 3, False), ([1.0] * 3, True)):
        with_sampling(engine, temperature, [seeded] * 3).proposal(0, 1)
        engine.commit([0, 1], [1, 1])
    assert engine.propose._cache_size() == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(head=Markov(rank=0)), "head.rank: expected at least 1, got 0"),
        (dict(head=Gru(size=0, rank=2)), "head.size: expected at least 1, got 0"),
        (
            dict(head=RNN, selector=Selector(rank=2, top_k=2)),
            "head, confidence: expected None with a candidate",
        ),
        (dict(head=None), "confidence.reads_token: expected False without a Markov head, got True"),
        (dict(head=Gru(size=2, rank=2)), "confidence: expected None with a GRU head"),
    ],
    ids=str,
)
def test_a_config_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        config(**{**dict(confidence=Confidence(reads_token=True)), **change})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: dflash(kind_of()),
            r"config: expected a drafter without a candidate selector or heads.*dspark\(\)",
        ),
        (
            lambda: dspark(kind_of("gru")),
            r"config: expected a drafter with a Markov head or none.*domino\(\)",
        ),
        (lambda: domino(kind_of()), r"config: expected a drafter with a GRU head.*dspark\(\)"),
        (lambda: domino(kind_of("gru"), candidate_pool=1), "candidate_pool: expected at least 2 ids"),
        (lambda: dspark(kind_of(), draft_length=6), r"draft_length: expected 1 to 5 \(block_size 5\), got 6"),
    ],
)
def test_another_methods_config_and_bad_options_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
