"""What an engine shows a block drafter, round by round, with features that tests can compute again."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import GroupLayout, new_cache
from jspec.drafters.dflash import DFlash, DFlashState, dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.protocol import Committed, Text
from jspec.round import Proposal
from jspec.sampling import SamplingTable, empty_table
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope
from jspec.targets.view import TargetView
from pallas_kernels.attention.pages import gather_rows

MASK, VOCABULARY, HIDDEN, HEAD_SIZE, HEADS, KV_HEADS = 15, 16, 12, 4, 4, 2
SLOTS, PAGE_SIZE, COLUMNS = 3, 4, 6
CONTEXT = PAGE_SIZE * COLUMNS
LANES, NODES, COMMITS = 4, 32, 20
ROPE, WINDOW_ROPE = Rope(theta=100.0), Rope(theta=30.0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayTarget:
    """Embedding and head only; its features are whatever a test says they are."""

    vocab_size: int = VOCABULARY
    hidden_size: int = HIDDEN
    num_layers: int = 6
    max_context: int = CONTEXT
    embedding_scale: float = 3.0
    softcap: float | None = 2.0

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
        logits = hidden @ params[1]
        return logits if self.softcap is None else self.softcap * jnp.tanh(logits / self.softcap)


def config(
    kinds: tuple[str, ...] = ("full", "window"),
    window: int = 3,
    is_causal: bool | None = None,
    block_size: int = 5,
    max_context: int = CONTEXT,
    own_embedding: bool = False,
    bias: bool = False,
    **added: Any,
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
        window_rope=WINDOW_ROPE,
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
        **added,
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

    def __init__(
        self,
        drafter: DFlash,
        params: tuple[jax.Array, ...],
        page_order: int = 0,
        softcap: float | None = 2.0,
    ):
        random = np.random.default_rng(7)
        embedding, head = random.normal(0, 1, (VOCABULARY, HIDDEN)), random.normal(0, 1, (HIDDEN, VOCABULARY))
        self.target_params = (jnp.asarray(embedding, jnp.float32), jnp.asarray(head, jnp.float32))
        self.target = ArrayTarget(softcap=softcap)
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
        self.state: DFlashState = drafter.init(params, self.view, SLOTS)
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
            is_first=context_lengths == 0,
        )
        self.state, ready = self.absorb(
            self.params, self.view, self.state, padded_lanes(lanes), self.text, committed
        )
        return ready[: len(lanes)].tolist()

    def proposal(self, *lanes: int) -> Proposal:
        return self.propose(self.params, self.view, self.state, padded_lanes(lanes), self.text, self.sampling)

    def draft(self, *lanes: int) -> list[list[int]]:
        out = self.proposal(*lanes)
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
            for layer in range(self.state.pages.k.shape[0])
            for array in gather_rows(self.state.pages, layer, table, length)
        ]


def tokens_of(request: int, length: int) -> list[int]:
    return np.random.default_rng(request).integers(0, MASK, length).tolist()
