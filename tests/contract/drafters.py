"""Drafters for a table target that are right, wrong, or wrong from some place on."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.coins import Purpose, uniforms
from jspec.drafters.dflash2 import DFlash2, dflash2
from jspec.drafters.dflash2_layers import Convolution, Selector
from jspec.drafters.dflash_init import init_dflash_params
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.domino import Domino, domino
from jspec.drafters.domino_head import Gru
from jspec.drafters.dspark import DSpark, dspark
from jspec.drafters.dspark_heads import Confidence, Markov
from jspec.net import Params
from jspec.round import Dense, OneHot, Proposal, Sparse
from jspec.slots import rows_of
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cut:
    """Proposes the target's own greedy line, with `right` right tokens before the first wrong one.

    right >= draft_length is ORACLE, right = 0 is ANTI. Its parameters are the target's: (table,).
    """

    draft_length: int
    right: int
    name: str = "cut"
    features: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def draft_depth(self):
        return self.draft_length

    def init(self, params, target, max_slots):
        return ()

    def draft(self, params, target, state, lanes, text, sampling):
        rows = rows_of(lanes)
        token = text.tokens[rows, text.lengths[rows] - 1]
        drafts = []
        for index in range(self.draft_length):
            best = jnp.argmax(params[0][token], axis=1).astype(jnp.int32)
            token = best if index < self.right else (best + 1) % params[0].shape[0]
            drafts.append(token)
        return Proposal(
            tokens=jnp.stack(drafts, axis=1),
            lengths=jnp.full(lanes.shape, self.draft_length, jnp.int32),
            q=OneHot(),
        )

    def absorb(self, params, target, state, lanes, text, committed):
        return state, jnp.full(lanes.shape, self.draft_length, jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Draws its tokens from a table of its own, and says from which row.

    Parameters: (logits,), or (logits, confidence): of a draft token, by the token before it.
    """

    draft_length: int
    sparse: bool
    varying: bool = False  # proposes 0, 1, 2, ... tokens, by the length of the text
    keyed_by_position: bool = False  # a fault: a token that was drafted and not verified is drafted again
    name: str = "drawn"
    features: tuple[str, ...] = ()
    simulated: bool = False

    @property
    def draft_depth(self):
        return self.draft_length

    def init(self, params, target, max_slots):
        return ()

    def draft(self, params, target, state, lanes, text, sampling):
        rows = rows_of(lanes)
        probs = jax.nn.softmax(params[0], axis=1)
        vocabulary = probs.shape[0]
        coins = self._coins(sampling.seeds[rows], text.lengths[rows] - 1)
        token = text.tokens[rows, text.lengths[rows] - 1]
        drafts, q, confidence = [], [], []
        for index in range(self.draft_length):
            row = probs[token]
            if len(params) > 1:
                confidence.append(params[1][token])
            past = jnp.cumsum(row, axis=1) > coins[:, index, None]
            token = jnp.where(past.any(1), jnp.argmax(past, axis=1), vocabulary - 1).astype(jnp.int32)
            drafts.append(token)
            q.append(row)
        q = jnp.stack(q, axis=1)
        if self.sparse:
            ids = jnp.broadcast_to(jnp.arange(vocabulary, dtype=jnp.int32)[::-1], q.shape)
            side = Sparse(ids=ids, probs=q[:, :, ::-1])
        else:
            side = Dense(probs=q, ids=None)
        return Proposal(
            tokens=jnp.stack(drafts, axis=1),
            lengths=self._lengths(text.lengths[rows]),
            q=side,
            confidence=jnp.stack(confidence, axis=1) if confidence else None,
        )

    def absorb(self, params, target, state, lanes, text, committed):
        return state, self._lengths(text.lengths[rows_of(lanes)])

    def _coins(self, seeds, committed_lengths):
        if not self.keyed_by_position:
            return uniforms(seeds, committed_lengths, self.draft_length, Purpose.DRAFT)
        positions = [committed_lengths + 1 + index for index in range(self.draft_length)]
        return jnp.concatenate([uniforms(seeds, at, 1, Purpose.DRAFT) for at in positions], axis=1)

    def _lengths(self, text_lengths):
        if self.varying:
            return text_lengths % (self.draft_length + 1)
        return jnp.full(text_lengths.shape, self.draft_length, jnp.int32)


def tiny_dflash2(vocab_size: int, draft_length: int) -> tuple[DFlash2, Params]:
    """A real DFlash 2 drafter for a table target, of random weights."""
    config = _block_config(
        vocab_size,
        draft_length + 1,
        convolution=Convolution(taps=2, group_size=4),
        selector=Selector(rank=3, top_k=4),
        output_multiplier=0.9,
        final_softcap=8.0,
    )
    return dflash2(config), _noisy(config)


def tiny_dspark(vocab_size: int, draft_length: int) -> tuple[DSpark, Params]:
    """A real DSpark drafter, as above."""
    config = _block_config(
        vocab_size,
        draft_length,
        anchor_predicts=True,
        head=Markov(rank=3, kind="rnn"),
        confidence=Confidence(reads_token=True),
    )
    return dspark(config), _noisy(config)


def tiny_domino(vocab_size: int, draft_length: int) -> tuple[Domino, Params]:
    """A real Domino drafter over a pool of candidates, as above."""
    config = _block_config(vocab_size, draft_length + 1, head=Gru(size=4, rank=3))
    return domino(config, candidate_pool=vocab_size - 2), _noisy(config)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WrongRow(DSpark):
    """Says of every token that it was drawn from the distribution of the row before it."""

    def draft(self, params, target, state, lanes, text, sampling):
        proposal = super().draft(params, target, state, lanes, text, sampling)
        assert isinstance(proposal.q, Dense)
        return dataclasses.replace(proposal, q=Dense(probs=jnp.roll(proposal.q.probs, 1, axis=1), ids=None))


def _block_config(vocab_size: int, block_size: int, **added: Any) -> DFlashConfig:
    """Its hidden state picks a row of the target's table, so its candidates are often plausible."""
    decoder = DecoderConfig(
        architecture="qwen3",
        vocab_size=vocab_size,
        hidden_size=vocab_size,
        intermediate_size=8,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_size=4,
        norm_eps=1e-6,
        max_context=64,
        full_rope=Rope(theta=100.0),
        layer_kinds=("full",),
        query_key_norm=True,
        query_scale=0.5,
    )
    return DFlashConfig(
        decoder=decoder,
        block_size=block_size,
        mask_token_id=vocab_size - 1,
        target_layer_ids=(0,),
        num_target_layers=1,
        target_hidden_size=vocab_size,
        **added,
    )


def _noisy(config: DFlashConfig) -> Params:
    params = init_dflash_params(config, jax.random.key(5), jnp.float32)
    keys = jax.random.split(jax.random.key(6), len(params))
    return tuple(p + 0.6 * jax.random.normal(k, p.shape) for p, k in zip(params, keys, strict=True))
