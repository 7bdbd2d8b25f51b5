"""DFlash against a dense forward pass in numpy, and its state against a clean rebuild."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.cache import GroupLayout, new_cache
from jspec.coins import coupled_noise
from jspec.drafters.dflash import DFlash, dflash, dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.protocol import Committed, Text
from jspec.sampling import SamplingTable, empty_table
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope
from jspec.targets.view import TargetView
from pallas_kernels.attention.pages import Pages, gather_rows

MASK, VOCABULARY, HIDDEN, HEAD_SIZE, HEADS, KV_HEADS = 15, 16, 12, 4, 4, 2
SLOTS, PAGE_SIZE, COLUMNS = 3, 4, 6
CONTEXT = PAGE_SIZE * COLUMNS
LANES, NODES, COMMITS = 4, 32, 20
ROPE = Rope(theta=100.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayTarget:
    """Embedding and head only; its features are whatever a test says they are."""

    vocab_size: int = VOCABULARY
    hidden_size: int = HIDDEN
    num_layers: int = 6
    max_context: int = CONTEXT
    embedding_scale: float = 3.0
    softcap: float = 2.0

    @property
    def identity(self) -> str:
        return f"arrays, {self.num_layers} layers"

    @property
    def groups(self) -> tuple[GroupLayout, ...]:
        return (GroupLayout(num_layers=0, num_kv_heads=1, head_size=1),)

    def forward(self, params, nodes, cache, lanes, capture, *, max_queries):
        raise NotImplementedError

    def embed(self, params, ids):
        return params[0][ids] * self.embedding_scale

    def logits(self, params, hidden):
        return self.softcap * jnp.tanh(hidden @ params[1] / self.softcap)


def config(
    kinds: tuple[str, ...] = ("full", "window"),
    window: int = 3,
    is_causal: bool | None = None,
    block_size: int = 5,
    max_context: int = CONTEXT,
    own_embedding: bool = False,
    bias: bool = False,
) -> DFlashConfig:
    decoder = DecoderConfig(
        architecture="dflash",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=20,
        num_layers=len(kinds),
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        norm_eps=1e-5,
        max_context=max_context,
        full_rope=ROPE,
        window_rope=ROPE,
        layer_kinds=kinds,
        window=window,
        query_key_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        query_scale=HEAD_SIZE**-0.5,
    )
    return DFlashConfig(
        decoder=decoder,
        block_size=block_size,
        mask_token_id=MASK,
        target_layer_ids=(-1, 2),
        num_target_layers=6,
        target_hidden_size=HIDDEN,
        is_causal=is_causal,
        own_embedding=own_embedding,
    )


def weights(config: DFlashConfig, seed: int = 0) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(seed)
    leaves = dflash_leaves(config, jnp.dtype(jnp.float32))
    return tuple(
        jnp.asarray(random.normal(0, 0.4, leaf.shape) + ("norm" in leaf.path), leaf.dtype) for leaf in leaves
    )


def feature(request: int, position: int) -> np.ndarray:
    return np.random.default_rng(1000 * request + position).normal(0, 1, 2 * HIDDEN).astype(np.float32)


@functools.cache
def compiled(drafter: DFlash):
    """Shapes are always the same here (LANES, NODES, COMMITS), so each of them is compiled once."""
    return jax.jit(drafter.absorb, donate_argnums=2), jax.jit(drafter.draft), jax.jit(drafter.block_hidden)


def padded_lanes(lanes: Sequence[int]) -> jax.Array:
    return jnp.asarray([*lanes, *[-1] * (LANES - len(lanes))], jnp.int32)


class Engine:
    """What an engine shows a drafter, round by round. A request is a number, which gives its features."""

    def __init__(self, drafter: DFlash, params: tuple[jax.Array, ...], page_order: int = 0):
        random = np.random.default_rng(7)
        embedding, head = random.normal(0, 1, (VOCABULARY, HIDDEN)), random.normal(0, 1, (HIDDEN, VOCABULARY))
        self.target_params = (jnp.asarray(embedding, jnp.float32), jnp.asarray(head, jnp.float32))
        self.target = ArrayTarget()
        self.drafter, self.params = drafter, params
        pages = SLOTS * COLUMNS
        cache = new_cache(
            self.target.groups,
            max_slots=SLOTS,
            num_pages=(pages,),
            page_size=PAGE_SIZE,
            max_context=CONTEXT,
            dtype=jnp.dtype(jnp.float32),
        )
        order = np.random.default_rng(page_order).permutation(pages).reshape(SLOTS, COLUMNS)
        group = dataclasses.replace(cache.groups[0], page_table=jnp.asarray(order, jnp.int32))
        self.cache = dataclasses.replace(cache, groups=(group,))
        self.text = Text(
            tokens=jnp.full((SLOTS, CONTEXT + 1), -9, jnp.int32), lengths=jnp.zeros((SLOTS,), jnp.int32)
        )
        self.sampling: SamplingTable = empty_table(SLOTS, VOCABULARY, 1)
        self.state: Pages = drafter.init(params, self.view, SLOTS)
        self.requests = [0] * SLOTS
        self.absorb, self.propose, self.hidden = compiled(drafter)

    @property
    def view(self) -> TargetView:
        return TargetView(params=self.target_params, cache=self.cache, target=self.target)

    def admit(self, slot: int, request: int, tokens: list[int]) -> None:
        self.requests[slot] = request
        row = np.full((CONTEXT + 1,), -9)
        row[: len(tokens)] = tokens
        self.text = Text(
            tokens=self.text.tokens.at[slot].set(jnp.asarray(row, jnp.int32)),
            lengths=self.text.lengths.at[slot].set(len(tokens)),
        )
        self.cache = dataclasses.replace(self.cache, lengths=self.cache.lengths.at[slot].set(0))

    def commit(
        self, lanes: list[int], counts: list[int], rejected: int = 0, fill: float = np.nan
    ) -> list[int]:
        """A round that commits the next `counts` tokens of each lane, `rejected` nodes behind them."""
        features, positions = np.full((NODES, 2 * HIDDEN), fill, np.float32), np.zeros((NODES,), np.int32)
        path = np.full((LANES, COMMITS), -1, np.int32)
        lengths, added, node = np.asarray(self.cache.lengths), np.zeros((SLOTS,), np.int32), 0
        for lane, (slot, count) in enumerate(zip(lanes, counts, strict=True)):
            for i in range(count + rejected):
                positions[node] = lengths[max(slot, 0)] + i
                if slot >= 0 and i < count:
                    path[lane, i] = node
                    features[node] = feature(self.requests[slot], positions[node])
                    added[slot] += 1
                node += 1
        context_lengths = jnp.asarray(lengths[np.maximum(padded_lanes(lanes), 0)])
        self.cache = dataclasses.replace(self.cache, lengths=self.cache.lengths + added)
        committed = Committed(
            features=jnp.asarray(features),
            positions=jnp.asarray(positions),
            path=jnp.asarray(path),
            context_lengths=context_lengths,
        )
        self.state, ready = self.absorb(
            self.params, self.view, self.state, padded_lanes(lanes), self.text, committed
        )
        return ready[: len(lanes)].tolist()

    def draft(self, *lanes: int) -> list[list[int]]:
        out = self.propose(self.params, self.view, self.state, padded_lanes(lanes), self.text, self.sampling)
        drafts = [row[:length] for row, length in zip(out.tokens.tolist(), out.lengths.tolist(), strict=True)]
        assert not any(drafts[len(lanes) :])
        return drafts[: len(lanes)]

    def logits(self, *lanes: int) -> np.ndarray:
        """Of the block's rows 1.., per lane."""
        hidden = self.hidden(self.params, self.view, self.state, padded_lanes(lanes), self.text)
        flat = self.view.logits(hidden[: len(lanes), 1:].reshape(-1, HIDDEN))
        return np.asarray(flat).reshape(len(lanes), -1, VOCABULARY)

    def rows(self, slot: int) -> list[np.ndarray]:
        """Keys and values of the slot's context, all layers."""
        length = int(self.cache.lengths[slot])
        table = self.cache.groups[0].page_table[slot][None]
        return [
            np.asarray(array[0, :length])
            for layer in range(self.state.k.shape[0])
            for array in gather_rows(self.state, layer, table, length)
        ]


def tokens_of(request: int, length: int) -> list[int]:
    return np.random.default_rng(request).integers(0, MASK, length).tolist()


def dense_logits(config: DFlashConfig, engine: Engine, slot: int, context: int) -> np.ndarray:
    """Logits of the block's rows 1.., by the definition and in float64."""
    named = {
        leaf.path: np.asarray(value, np.float64)
        for leaf, value in zip(dflash_leaves(config, jnp.dtype(jnp.float32)), engine.params, strict=True)
    }
    norm = lambda x, w: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * w  # noqa: E731

    def turned(x: np.ndarray, positions: np.ndarray) -> np.ndarray:
        angles = positions[:, None] / 100.0 ** (np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    block = config.block_size
    at = np.arange(context + block)  # positions of keys: context, then block
    features = np.stack([feature(engine.requests[slot], p) for p in range(context)]).astype(np.float64)
    seen = norm(features @ named["fc"], named["hidden_norm"])
    ids = [int(engine.text.tokens[slot, context])] + [MASK] * (block - 1)
    if config.own_embedding:
        x = named["embedding"][ids]
    else:
        x = np.asarray(engine.target_params[0], np.float64)[ids] * engine.target.embedding_scale
    for index, kind in enumerate(config.decoder.layer_kinds):
        w = {
            k.removeprefix(f"layers.{index}."): v
            for k, v in named.items()
            if k.startswith(f"layers.{index}.")
        }
        h = norm(x, w["attention_norm"])

        def heads(y: np.ndarray, name: str, w: dict = w) -> np.ndarray:
            out = y @ w[f"attention.{name}"] + w.get(f"attention.{name}_bias", 0)
            return out.reshape(len(y), -1, HEAD_SIZE)

        q = turned(norm(heads(h, "query"), w["attention.query_norm"]), at[context:])
        both = np.concatenate([seen, h])
        k = turned(norm(heads(both, "key"), w["attention.key_norm"]), at)
        v = heads(both, "value")
        causal = kind == "window" if config.is_causal is None else config.is_causal
        delta = at[context:, None] - at[None, :]
        allowed = np.ones_like(delta, bool)
        if causal:
            allowed &= delta >= 0
        if kind == "window":
            allowed &= delta < config.decoder.window
        out = np.zeros((block, HEADS, HEAD_SIZE))
        for head in range(HEADS):
            g = head // (HEADS // KV_HEADS)
            scores = np.where(allowed, q[:, head] @ k[:, g].T / np.sqrt(HEAD_SIZE), -np.inf)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, g]
        x = x + out.reshape(block, -1) @ w["attention.output"] + w.get("attention.output_bias", 0)
        h = norm(x, w["mlp_norm"])
        gate = h @ w["mlp.gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["mlp.up"])) @ w["mlp.down"]
    logits = norm(x, named["norm"])[1:] @ np.asarray(engine.target_params[1], np.float64)
    return engine.target.softcap * np.tanh(logits / engine.target.softcap)


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
    used = np.asarray(engine.state.v)
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
    ],
)
def test_a_config_that_cannot_be_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(config(), **change)


@pytest.mark.parametrize("length", [0, 5])
def test_draft_length_must_fit_the_block(length):
    with pytest.raises(ValueError, match=rf"draft_length: expected 1 to 4 .* got {length}"):
        dflash(config(), draft_length=length)
