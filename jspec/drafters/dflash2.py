"""DFlash 2: the block's masked rows give candidates, a walk from the anchor picks one of each row.

One pass of the network, as in DFlash; then every row's token depends on the one before it. Sampled
requests draw theirs and say from which distribution, so that the verifier can use all of it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.coins import Purpose, coupled_noise, uniforms
from jspec.drafters.dflash import DFlash, DFlashState, checked_draft_length, dflash_net
from jspec.drafters.dflash2_lattice import (
    Candidates,
    Walk,
    greedy_choice,
    sampled_choice,
    top_candidates,
    walk,
)
from jspec.drafters.dflash2_layers import CandidateSelector
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.protocol import Text
from jspec.net import Params
from jspec.round import Proposal, Sparse
from jspec.sampling import SamplingTable
from jspec.slots import rows_of
from jspec.targets.view import TargetView


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2(DFlash):
    """See `dflash2`. Its state is DFlash's."""

    name: str = "dflash2"

    def draft(
        self,
        params: Params,
        target: TargetView,
        state: DFlashState,
        lanes: Int[Array, "lanes"],
        text: Text,
        sampling: SamplingTable,
    ) -> Proposal:
        """A path through the candidates of every masked place.

        q holds what each token was taken from: softmax(scores / temperature) over the row's candidates
        for sampled requests without a seed, all mass on the token for others. Past a proposal's length
        it holds nothing (id -1, probability 0).
        """
        assert self.config.selector is not None
        net = dflash_net(self.config, params)
        selector = net.candidate_selector
        assert selector is not None
        rows, drafting = rows_of(lanes), self._drafting(target, lanes, text)
        hidden, logits = self.draft_rows(params, target, state, lanes, text)
        best = top_candidates(logits, self.config.selector.top_k)
        candidates = Candidates(ids=net.target_ids(best.ids), unary=best.unary)
        committed = jnp.where(drafting, target.cache.lengths[rows], 0)
        anchors = jnp.where(drafting, text.tokens[rows, committed], self.config.mask_token_id)
        path = select(
            selector, anchors, hidden, candidates, sampling, lanes, committed, self.config.decoder.vocab_size
        )
        sound = jnp.sum(path.tokens >= 0, axis=1, dtype=jnp.int32)
        lengths = jnp.where(drafting, sound, 0)
        within = jax.lax.broadcasted_iota(jnp.int32, path.tokens.shape, 1)
        held = (within < lengths[:, None])[:, :, None]
        return Proposal(
            tokens=jnp.maximum(path.tokens, 0),
            lengths=lengths,
            q=Sparse(ids=jnp.where(held, candidates.ids, -1), probs=jnp.where(held, path.probs, 0)),
        )


def dflash2(config: DFlashConfig, *, draft_length: int | None = None) -> DFlash2:
    """A DFlash 2 drafter.

    Args:
      config: with a selector, and usually a convolution.
      draft_length: draft tokens per proposal, 1 .. block_size - 1; None = all. A shorter one drafts the
        same first tokens.

    Raises:
      ValueError: draft_length out of range, or a config without a selector.

    Source: SGLang 0.5.23, models/dflash.py and speculative/dflash_worker_v2.py; temperatures are applied
    below the best score rather than clamped, and coins are of the request and its round.
    """
    if config.selector is None:
        raise ValueError(
            f"config: expected a drafter with a candidate selector, got ({config.identity}); use dflash()"
        )
    return DFlash2(config=config, draft_length=checked_draft_length(config, draft_length))


def select(
    selector: CandidateSelector,
    anchors: Int[Array, "lanes"],
    hidden: Float[Array, "lanes drafts hidden"],
    candidates: Candidates,
    sampling: SamplingTable,
    lanes: Int[Array, "lanes"],
    committed_lengths: Int[Array, "lanes"],
    vocab_size: int,
) -> Walk:
    """Walks every lane's candidates by the rule that its request asks for.

    Greedy requests take the best candidate; those with a seed the best after adding the noise that the
    coupled verifier adds; the others draw by inverse CDF, with coins of their own purpose.

    Args:
      selector: scores candidates.
      anchors: last tokens of the lanes.
      hidden: of the rows that predict.
      candidates: of these rows.
      sampling: settings of the slots.
      lanes: slot of each lane, -1 for padding.
      committed_lengths: tokens before the anchors.
      vocab_size: of the target.
    """
    slots, drafts = rows_of(lanes), hidden.shape[1]
    sampled = (lanes >= 0) & (sampling.temperature[slots] > 0)
    coupled = sampled & sampling.seeded[slots]
    drawn = sampled & ~sampling.seeded[slots]
    temperature = jnp.where(sampled, sampling.temperature[slots], 1)
    coins = uniforms(sampling.seeds[slots], committed_lengths, drafts, Purpose.DRAFT)
    noise = _candidate_noise(sampling, slots, coupled, committed_lengths + 1, candidates.ids, vocab_size)
    projected = selector.project(hidden)

    def score(row: int, before: Int[Array, "lanes"]) -> Float[Array, "lanes candidates"]:
        return selector.scores(projected[:, row], before, candidates.ids[:, row], candidates.unary[:, row])

    def choose(
        row: int, scores: Float[Array, "lanes candidates"]
    ) -> tuple[Int[Array, "lanes"], Float[Array, "lanes candidates"]]:
        shifted = (scores - jnp.max(scores, axis=1, keepdims=True)) / temperature[:, None]
        best, mass = greedy_choice(jnp.where(coupled[:, None], shifted + noise[:, row], scores))
        index, probs = sampled_choice(scores, temperature, coins[:, row])
        return jnp.where(drawn, index, best), jnp.where(drawn[:, None], probs, mass)

    return walk(anchors, candidates.ids, score, choose)


def _candidate_noise(
    sampling: SamplingTable,
    slots: Int[Array, "lanes"],
    coupled: Bool[Array, "lanes"],
    first_positions: Int[Array, "lanes"],
    ids: Int[Array, "lanes drafts candidates"],
    vocab_size: int,
) -> Float[Array, "lanes drafts candidates"]:
    """The noise that the coupled verifier will add to each candidate; 0 if no lane needs it.

    Args:
      sampling: settings of the slots.
      slots: of the lanes.
      coupled: lanes that need it; others get anything.
      first_positions: in the text, of draft token 0.
      ids: the candidates.
      vocab_size: of the target.
    """
    num_lanes, drafts, top_k = ids.shape

    def noise() -> Array:
        within = jax.lax.broadcasted_iota(jnp.int32, (num_lanes, drafts), 1)
        positions = (first_positions[:, None] + within).reshape(-1)
        whole = coupled_noise(jnp.repeat(sampling.seeds[slots], drafts), positions, vocab_size)
        return jnp.take_along_axis(whole, ids.reshape(-1, top_k), axis=1).reshape(ids.shape)

    return jax.lax.cond(jnp.any(coupled), noise, lambda: jnp.zeros(ids.shape, jnp.float32))
