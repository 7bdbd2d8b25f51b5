"""DSpark: one backbone pass over the block, then one light scan that draws its tokens left to right.

Each row's logits are corrected by the tokens drafted before it. Sampled requests draw from these logits and
say from which distribution, and every token comes with the probability that it will be accepted.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.coins import Purpose, coupled_noise, uniforms
from jspec.drafters.dflash import DFlash, DFlashState, checked_draft_length, dflash_net, embedder
from jspec.drafters.dflash_net import DFlashConfig, DFlashNet
from jspec.drafters.domino_head import Gru
from jspec.drafters.protocol import Text
from jspec.drafters.sequential import Choose, Embed, all_mass, drawn_choice, noisy_choice, walk
from jspec.net import Params
from jspec.round import Dense, Proposal, Sparse
from jspec.sampling import SamplingTable
from jspec.slots import rows_of
from jspec.targets.view import TargetView
from jspec.vocabulary import largest
from pallas_kernels.vocabulary_row.choices import argmax


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSpark(DFlash):
    """See `dspark`. Its state is DFlash's."""

    name: str = "dspark"
    candidate_pool: int | None = None  # ids per lane that are corrected and drafted; None = all

    def draft(
        self,
        params: Params,
        target: TargetView,
        state: DFlashState,
        lanes: Int[Array, "lanes"],
        text: Text,
        sampling: SamplingTable,
    ) -> Proposal:
        """A line of tokens, each chosen from its row's logits after those before it corrected them.

        q holds what each token was taken from: softmax(logits / temperature) for sampled requests without a
        seed, all mass on the token for others, nothing past a proposal's length. It is Dense, or Sparse
        over a candidate pool.
        """
        net = dflash_net(self.config, params)
        rows, drafting = rows_of(lanes), self._drafting(target, lanes, text)
        hidden, logits = self.draft_rows(params, target, state, lanes, text)
        committed = jnp.where(drafting, target.cache.lengths[rows], 0)
        anchors = jnp.where(drafting, text.tokens[rows, committed], self.config.mask_token_id)
        embed, ids, pool = embedder(net, target), None, None
        if net.draft_ids is not None:
            ids = net.draft_ids[...]
        if self.candidate_pool is not None and self.candidate_pool < logits.shape[2]:
            pool = best_columns(logits, self.candidate_pool)
            logits = jnp.take_along_axis(logits, pool[:, None], axis=2)
            ids = net.target_ids(pool)
        choose = rule_of(
            sampling, lanes, committed, logits.shape[1], ids, vocab_size=self.config.decoder.vocab_size
        )
        path = walk(net.head, embed, anchors, drafting, hidden, logits, choose, ids=ids, pool=pool)
        tokens = jnp.maximum(path.tokens, 0)
        if pool is None:
            q = Dense(probs=path.probs, ids=ids)
        else:
            assert ids is not None
            q = Sparse(ids=jnp.broadcast_to(ids[:, None], path.probs.shape), probs=path.probs)
        return Proposal(
            tokens=tokens,
            lengths=jnp.sum(path.tokens >= 0, axis=1, dtype=jnp.int32),
            q=q,
            confidence=self._confidence(net, embed, anchors, hidden, tokens),
        )

    def _confidence(
        self,
        net: DFlashNet,
        embed: Embed,
        anchors: Int[Array, "lanes"],
        hidden: Float[Array, "lanes drafts hidden"],
        tokens: Int[Array, "lanes drafts"],
    ) -> Float[Array, "lanes drafts"] | None:
        if net.confidence_head is None:
            return None
        before = jnp.concatenate([anchors[:, None], tokens[:, :-1]], axis=1)
        read = None if net.head is None else net.head.read(before, embed)
        return jax.nn.sigmoid(net.confidence_head.logits(hidden, read))


def dspark(config: DFlashConfig, *, draft_length: int | None = None) -> DSpark:
    """A DSpark drafter.

    Args:
      config: with a Markov head, a confidence head, both or neither.
      draft_length: draft tokens per proposal; None = all rows that predict. A shorter one drafts the same
        first tokens.

    Raises:
      ValueError: draft_length out of range, or another method's config.

    Source: DSpark (arXiv 2607.05147), section 3.1; SGLang 0.5.23, models/dspark.py. Differences: a draw is by
    inverse CDF from coins of the request and its round; temperatures are applied below the best score, not
    clamped.
    """
    if config.selector is not None or isinstance(config.head, Gru):
        raise ValueError(
            f"config: expected a drafter with a Markov head or none, got ({config.identity}); use dflash2() or domino()"
        )
    return DSpark(config=config, draft_length=checked_draft_length(config, draft_length))


def best_columns(logits: Float[Array, "lanes drafts columns"], size: int) -> Int[Array, "lanes size"]:
    """The columns with the greatest logit in any row of the lane, ascending."""
    return jnp.sort(largest(jnp.max(logits, axis=1), size)[1], axis=1)


def rule_of(
    sampling: SamplingTable,
    lanes: Int[Array, "lanes"],
    committed_lengths: Int[Array, "lanes"],
    drafts: int,
    ids: Int[Array, "lanes columns"] | Int[Array, "columns"] | None,
    *,
    vocab_size: int,
) -> Choose:
    """How each lane takes a token of its row's logits.

    Greedy requests take the best one; those with a seed the best after adding the noise that the coupled
    verifier adds; the others draw, with coins of their own purpose. What no lane needs is skipped.

    Args:
      sampling: settings of the slots.
      lanes: slot of each lane, -1 for padding.
      committed_lengths: tokens before the anchors.
      drafts: rows.
      ids: target id of each column; None = the columns are ids.
      vocab_size: of the target.
    """
    slots = rows_of(lanes)
    sampled = (lanes >= 0) & (sampling.temperature[slots] > 0)
    coupled, drawn = sampled & sampling.seeded[slots], sampled & ~sampling.seeded[slots]
    temperature = jnp.where(sampled, sampling.temperature[slots], 1)
    coins = uniforms(sampling.seeds[slots], committed_lengths, drafts, Purpose.DRAFT)

    def choose(row: Array, scores: Array) -> tuple[Array, Array]:
        def with_noise() -> Array:
            noise = coupled_noise(sampling.seeds[slots], committed_lengths + 1 + row, vocab_size)
            if ids is not None:
                noise = noise[:, ids] if ids.ndim == 1 else jnp.take_along_axis(noise, ids, axis=1)
            return jnp.where(coupled, noisy_choice(scores, temperature, noise), best)

        def with_draws() -> tuple[Array, Array]:
            index, probs = drawn_choice(scores, temperature, coins[:, row])
            return jnp.where(drawn, index, column), jnp.where(drawn[:, None], probs, mass)

        best = argmax(scores)
        column = jax.lax.cond(jnp.any(coupled), with_noise, lambda: best)
        mass = all_mass(column, scores.shape[1])
        return jax.lax.cond(jnp.any(drawn), with_draws, lambda: (column, mass))

    return choose
