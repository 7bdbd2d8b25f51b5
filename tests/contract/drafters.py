"""Drafters for a table target that are right, wrong, or wrong from some place on."""

import dataclasses

import jax
import jax.numpy as jnp

from jspec.coins import Purpose, uniforms
from jspec.round import Dense, OneHot, Proposal, Sparse, chain_parents
from jspec.slots import rows_of


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
            parents=chain_parents(lanes.shape[0], self.draft_length),
            lengths=jnp.full(lanes.shape, self.draft_length, jnp.int32),
            q=OneHot(),
        )

    def absorb(self, params, target, state, lanes, text, committed):
        return state, jnp.full(lanes.shape, self.draft_length, jnp.int32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drawn:
    """Draws its tokens from a table of its own, and says from which row. Parameters: (logits,)."""

    draft_length: int
    sparse: bool
    varying: bool = False  # proposes 0, 1, 2, ... tokens, by the length of the text
    name: str = "drawn"
    features: tuple[str, ...] = ()
    simulated: bool = False

    def init(self, params, target, max_slots):
        return ()

    def draft(self, params, target, state, lanes, text, sampling):
        rows = rows_of(lanes)
        probs = jax.nn.softmax(params[0], axis=1)
        vocabulary = probs.shape[0]
        coins = uniforms(sampling.seeds[rows], text.lengths[rows] - 1, self.draft_length, Purpose.DRAFT)
        token = text.tokens[rows, text.lengths[rows] - 1]
        drafts, q = [], []
        for index in range(self.draft_length):
            row = probs[token]
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
            parents=chain_parents(lanes.shape[0], self.draft_length),
            lengths=self._lengths(text.lengths[rows]),
            q=side,
        )

    def absorb(self, params, target, state, lanes, text, committed):
        return state, self._lengths(text.lengths[rows_of(lanes)])

    def _lengths(self, text_lengths):
        if self.varying:
            return text_lengths % (self.draft_length + 1)
        return jnp.full(text_lengths.shape, self.draft_length, jnp.int32)
