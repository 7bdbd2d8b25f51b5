"""What an engine shows an EAGLE drafter, round by round, and the same drafts computed without any cache."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from block_engine import COLUMNS, CONTEXT, HIDDEN, PAGE_SIZE, SLOTS, VOCABULARY, ArrayTarget, feature

from jspec.cache import new_cache
from jspec.drafters.eagle import Eagle
from jspec.drafters.eagle_net import EagleConfig, eagle_leaves, eagle_net
from jspec.drafters.protocol import Committed, Text
from jspec.round import Proposal
from jspec.sampling import empty_table
from jspec.targets.config import DecoderConfig, LayerKind
from jspec.targets.rope import Llama3, Rope
from jspec.targets.view import TargetView
from pallas_kernels.attention.pages import gather_rows

LANES, NODES, COMMITS = 3, 24, 12
# As Gemma 3's: window layers turn with another base, and are not scaled.
WINDOW_ROPE = Rope(theta=10.0)
ROWS = 16  # of passes without a cache: as many as a test's text and path may have
ROPE = Rope(
    theta=100.0, scaling=Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8)
)
# Compiling takes far longer than running.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})


def config(
    layers: int = 1,
    max_context: int = CONTEXT,
    norm: bool = False,
    kinds: tuple[LayerKind, ...] | None = None,
    window: int | None = None,
    rope: Rope = ROPE,
    **added: Any,
) -> EagleConfig:
    decoder = DecoderConfig(
        architecture="qwen3" if norm else "llama",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=20,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_size=4,
        norm_eps=1e-5,
        max_context=max_context,
        full_rope=rope,
        window_rope=None if window is None else WINDOW_ROPE,
        window=window,
        layer_kinds=kinds or ("full",) * layers,
        query_key_norm=norm,
        query_scale=0.5,
    )
    defaults: dict[str, Any] = dict(kind="eagle3", features=("layer.1", "layer.4"), num_target_layers=6)
    if added.get("kind") == "eagle":
        defaults |= dict(features=("final_norm",), head_reads_norm=False)
    return EagleConfig(decoder=decoder, target_hidden_size=HIDDEN, **(defaults | added))


def weights(config: EagleConfig, seed: int = 0) -> tuple[jax.Array, ...]:
    random = np.random.default_rng(seed)

    def values(path: str, shape: tuple[int, ...]) -> np.ndarray:
        if path == "draft_ids":
            return np.sort(random.choice(VOCABULARY, shape[0], replace=False))
        return random.normal(0, 0.4, shape) + ("norm" in path)

    leaves = eagle_leaves(config, jnp.dtype(jnp.float32))
    return tuple(jnp.asarray(values(leaf.path, leaf.shape), leaf.dtype) for leaf in leaves)


def features_of(config: EagleConfig, request: int, length: int, padded: int = 0) -> np.ndarray:
    rows = np.zeros((max(length, padded), config.features_size), np.float32)
    for position in range(length):
        rows[position] = feature(request, position)[: config.features_size]
    return rows


@functools.cache
def compiled(drafter: Eagle):
    return jit(drafter.absorb), jit(drafter.draft)


class Engine:
    """Slots of known texts, of which rounds commit more and more. A request is a number: its features."""

    def __init__(self, drafter: Eagle, params: tuple[jax.Array, ...], page_order: int = 0):
        random = np.random.default_rng(7)
        embedding, head = random.normal(0, 1, (VOCABULARY, HIDDEN)), random.normal(0, 1, (HIDDEN, VOCABULARY))
        self.target_params = (jnp.asarray(embedding, jnp.float32), jnp.asarray(head, jnp.float32))
        self.drafter, self.params = drafter, params
        # A reduced vocabulary needs a linear head.
        self.target = ArrayTarget(softcap=None, embedding_scale=1.0)
        cache = new_cache(
            self.target.groups,
            max_slots=SLOTS,
            num_pages=(SLOTS * COLUMNS,),
            page_size=PAGE_SIZE,
            max_context=CONTEXT,
            dtype=jnp.dtype(jnp.float32),
        )
        order = np.random.default_rng(page_order).permutation(SLOTS * COLUMNS).reshape(SLOTS, COLUMNS)
        group = dataclasses.replace(cache.groups[0], page_table=jnp.asarray(order, jnp.int32))
        self.cache = dataclasses.replace(cache, groups=(group,))
        self.tokens = np.full((SLOTS, CONTEXT + 1), -9)
        self.requests, self.sampling = [0] * SLOTS, empty_table(SLOTS, VOCABULARY, 1)
        self.state = drafter.init(params, self.view, SLOTS)
        self.absorb, self.propose = compiled(drafter)

    @property
    def view(self) -> TargetView:
        return TargetView(params=self.target_params, cache=self.cache, target=self.target)

    @property
    def text(self) -> Text:
        """As long as what is committed, and the anchor."""
        return Text(tokens=jnp.asarray(self.tokens, jnp.int32), lengths=self.cache.lengths + 1)

    def admit(self, slot: int, request: int) -> None:
        self.requests[slot] = request
        self.tokens[slot] = np.random.default_rng(request).integers(0, VOCABULARY, CONTEXT + 1)
        self.cache = dataclasses.replace(self.cache, lengths=self.cache.lengths.at[slot].set(0))

    def commit(
        self, slots: Sequence[int], counts: Sequence[int], *, rejected: int = 0, scattered: bool = False
    ) -> list[int]:
        """A round that commits the next `counts` tokens of each lane, among `rejected` further nodes each.

        The others hold NaN; they lie behind the committed ones, or (scattered, as in a tree) between them.
        """
        width = self.drafter.config.features_size
        features, positions = np.full((NODES, width), np.nan, np.float32), np.zeros((NODES,), np.int32)
        path = np.full((LANES, COMMITS), -1, np.int32)
        lengths, added, node = np.asarray(self.cache.lengths), np.zeros((SLOTS,), np.int32), 0
        for lane, (slot, count) in enumerate(zip(slots, counts, strict=True)):
            places = np.arange(count + rejected)
            if scattered:
                places = np.sort(np.random.default_rng(count).permutation(places)[:count])
            rows = features_of(self.drafter.config, self.requests[slot], lengths[slot] + count)
            for i in range(count if slot >= 0 else 0):
                path[lane, i] = node + places[i]
                features[path[lane, i]] = rows[lengths[slot] + i]
                positions[path[lane, i]] = lengths[slot] + i
                added[slot] += 1
            node += count + rejected
        lanes = self.lanes(slots)
        self.cache = dataclasses.replace(self.cache, lengths=self.cache.lengths + added)
        committed = Committed(
            features=jnp.asarray(features),
            positions=jnp.asarray(positions),
            path=jnp.asarray(path),
            context_lengths=jnp.asarray(lengths)[jnp.maximum(lanes, 0)],
            is_first=jnp.asarray(lengths == 0)[jnp.maximum(lanes, 0)],
        )
        self.state, ready = self.absorb(self.params, self.view, self.state, lanes, self.text, committed)
        return ready[: len(slots)].tolist()

    def draft(self, *slots: int) -> Proposal:
        return self.propose(self.params, self.view, self.state, self.lanes(slots), self.text, self.sampling)

    def lanes(self, slots: Sequence[int]) -> jax.Array:
        return jnp.asarray([*slots, *[-1] * (LANES - len(slots))], jnp.int32)

    def held(self, slot: int) -> list[np.ndarray]:
        """Everything that the drafter holds of a slot."""
        length = int(self.cache.lengths[slot])
        table = self.cache.groups[0].page_table[slot][None]
        rows = [
            np.asarray(array[0, :length])
            for layer in range(self.drafter.config.decoder.num_layers)
            for array in gather_rows(self.state.pages, layer, table, length)
        ]
        return [*rows, *(np.asarray(a[slot]) for a in (self.state.states, self.state.ids, self.state.probs))]

    def rollout(self, slot: int, path: Sequence[int]) -> np.ndarray:
        """Probabilities [vocabulary] of the token after a path of draft tokens, all rows computed afresh."""
        config = self.drafter.config
        net = eagle_net(config, self.params)
        length, last = int(self.cache.lengths[slot]), int(self.cache.lengths[slot]) + len(path) - 1
        fused, masked = _pieces(config)(
            self.params, jnp.asarray(features_of(config, self.requests[slot], length, ROWS))
        )
        tokens, states = np.zeros((ROWS,), np.int32), np.array(fused)
        tokens[:length] = self.tokens[slot, 1 : length + 1]
        run = _dense(config)
        if config.mask_token_id is None:
            for place, token in enumerate(path, start=length):
                states[place] = run(self.params, self.target_params[0], states, tokens)[1][place - 1]
                tokens[place] = token
        else:
            states[length:], tokens[length:] = masked, config.mask_token_id
        out = run(self.params, self.target_params[0], states, tokens)[0][last : last + 1]
        ids = np.arange(VOCABULARY) if net.draft_ids is None else np.asarray(net.draft_ids[...])
        logits = net.logits(jnp.asarray(out), lambda hidden: (hidden @ self.target_params[1])[:, ids])
        probs = np.zeros((VOCABULARY,))
        probs[ids] = np.asarray(jax.nn.softmax(logits[0]))
        return probs


@functools.cache
def _pieces(config: EagleConfig):
    """Fused features, and the fused mask."""

    def run(params, features):
        net = eagle_net(config, params)
        mask = None if net.mask_hidden is None else net.fuse(net.mask_hidden[...][None])[0]
        return net.fuse(features), mask

    return jit(run)


@functools.cache
def _dense(config: EagleConfig):
    """One causal pass over ROWS rows: what it returns, and what is fed back. A row's position is its place."""

    def run(params, table, states, tokens):
        net = eagle_net(config, params)

        def see(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
            group = q.shape[1] // k.shape[1]
            k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
            scores = jnp.einsum("qhd,khd->hqk", q, k) * config.decoder.query_scale
            before = np.arange(ROWS)[:, None] - np.arange(ROWS)[None]
            windowed = config.decoder.layer_kinds[layer] == "window"
            visible = (before >= 0) & (before < (config.decoder.window if windowed else ROWS))
            scores = jnp.where(visible[None], scores, -jnp.inf)
            return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores, axis=-1), v)

        embeddings = net.embed(tokens, lambda ids: table[ids])
        out = net.step(embeddings, states, jnp.arange(ROWS), lambda layer: functools.partial(see, layer))[0]
        return out, net.fed_back(out)

    return jit(run)


def paths_of(proposal: Proposal, lane: int) -> list[tuple[int, ...]]:
    """Draft tokens from the anchor down to each draft token, itself included."""
    tokens = np.asarray(proposal.tokens[lane]).tolist()
    parents = range(len(tokens)) if proposal.parents is None else np.asarray(proposal.parents[lane]).tolist()
    paths: list[tuple[int, ...]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append(((*paths[parent - 1], token)) if parent else (token,))
    return paths
