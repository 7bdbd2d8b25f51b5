"""Forced accept lengths: what a drafter of a given quality would cost and gain, without training it.

The draft tokens are arbitrary and the text is not the target's. The only program that honours this
asks for it by type: see `Simulated.verdict`. Results carry a `simulated` mark.
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.coins import Purpose, uniforms
from jspec.drafters.protocol import Committed, Text
from jspec.round import OneHot, Proposal, Verdict, chain_path
from jspec.sampling import SamplingTable
from jspec.slots import rows_of, slots_of
from jspec.target_rows import TargetRows
from jspec.targets.view import TargetView
from pallas_kernels.pytree import pytree


@pytree
class SimulatedState:
    """How many rounds each slot's request has had since its prompt was executed."""

    rounds: Int[Array, "slots"]
    text_lengths: Int[Array, "slots"]  # tokens known after the last of them


@dataclasses.dataclass(frozen=True, kw_only=True)
class Simulated:
    """See `simulated`. It has no parameters and needs no features."""

    draft_length: int
    mean: float | int | None
    accept_lengths: tuple[int, ...]
    seed: int
    name: str = "simulated"
    features: tuple[str, ...] = ()
    simulated: bool = True

    @property
    def draft_depth(self) -> int:
        """It drafts chains."""
        return self.draft_length

    def init(self, params: Any, target: TargetView, max_slots: int) -> SimulatedState:
        """No rounds yet; serves any target."""
        return SimulatedState(
            rounds=jnp.zeros((max_slots,), jnp.int32), text_lengths=jnp.full((max_slots,), -1, jnp.int32)
        )

    def draft(
        self,
        params: Any,
        target: TargetView,
        state: SimulatedState,
        lanes: Int[Array, "lanes"],
        text: Text,
        sampling: SamplingTable,
    ) -> Proposal:
        """The anchor again and again: an id that surely exists and is no stop token that still counts."""
        rows = rows_of(lanes)
        anchors = text.tokens[rows, jnp.maximum(text.lengths[rows] - 1, 0)]
        return Proposal(
            tokens=jnp.broadcast_to(anchors[:, None], (lanes.shape[0], self.draft_length)),
            lengths=jnp.where(lanes >= 0, self.draft_length, 0),
            q=OneHot(),
        )

    def absorb(
        self,
        params: Any,
        target: TargetView,
        state: SimulatedState,
        lanes: Int[Array, "lanes"],
        text: Text,
        committed: Committed,
    ) -> tuple[SimulatedState, Int[Array, "lanes"]]:
        """Counts the round."""
        rows = rows_of(lanes)
        # The rounds after the prompt follow each other; anything else is a new request on the slot.
        follows = (state.text_lengths[rows] == committed.context_lengths + 1) & ~committed.is_first
        slots = slots_of(lanes, state.rounds.shape[0])
        state = SimulatedState(
            rounds=state.rounds.at[slots].set(jnp.where(follows, state.rounds[rows] + 1, 0), mode="drop"),
            text_lengths=state.text_lengths.at[slots].set(text.lengths[rows], mode="drop"),
        )
        return state, jnp.where(lanes >= 0, self.draft_length, 0)

    def verdict(
        self,
        state: SimulatedState,
        lanes: Int[Array, "lanes"],
        proposal: Proposal,
        rows: TargetRows,
        verify_lengths: Int[Array, "lanes"],
    ) -> Verdict:
        """Takes the place of verification: accepts the forced length, whatever the target says.

        Never more than was verified, so a smaller budget or the end of a request still bounds it.
        The bonus is the target's best token at the last accepted node.

        Args:
          state: of the round's start.
          lanes: slot of each lane, -1 for padding.
          proposal: as `draft` made it, possibly cut.
          rows: the target's distribution after every verified node.
          verify_lengths: draft tokens that the target executed.
        """
        accept_length = jnp.minimum(self._wanted(state, lanes), verify_lengths)
        bonus = rows.argmax(accept_length[:, None])[:, 0]
        return Verdict(
            path=chain_path(accept_length, proposal.tokens.shape[1] + 1),
            accept_length=accept_length,
            bonus=bonus,
        )

    def _wanted(self, state: SimulatedState, lanes: Int[Array, "lanes"]) -> Int[Array, "lanes"]:
        slots = rows_of(lanes)
        rounds = state.rounds[slots]
        if self.mean is None:
            return jnp.asarray(self.accept_lengths, jnp.int32)[rounds % len(self.accept_lengths)]
        seeds = jnp.uint32(self.seed) ^ (slots.astype(jnp.uint32) * jnp.uint32(0x9E3779B9))  # apart by slot
        coins = uniforms(seeds, rounds, 1, Purpose.DRAFT)[:, 0]
        floor = math.floor(self.mean)
        return floor + (coins < self.mean - floor).astype(jnp.int32)


def simulated(
    *,
    draft_length: int,
    mean_accept_length: float | int | None = None,
    accept_lengths: Sequence[int] | None = None,
    seed: int = 0,
) -> Simulated:
    """A drafter without a model, whose accept lengths are given. Exactly one of the two ways is used.

    Use it with ignored stop tokens: the text means nothing, so where it stops means nothing either.

    Args:
      draft_length: draft tokens per proposal.
      mean_accept_length: mean of the draft tokens accepted per round, the bonus not counted; every
        round accepts its floor or its ceiling, drawn from (seed, slot, round).
      accept_lengths: accept length of each request's first, second, ... round; starts over at its end.
      seed: 0 .. 2^32 - 1.

    Raises:
      ValueError: a length outside 0 .. draft_length, or not exactly one of the two ways.

    Source: "match-expected" simulated acceptance as in SGLang 0.5.23, there by environment variable.
    """
    if draft_length < 1:
        raise ValueError(
            f"draft_length: expected at least 1, got {draft_length}; use plain() to propose nothing"
        )
    forced: list[float]
    if accept_lengths is not None and mean_accept_length is None:
        forced = list(accept_lengths)
    elif mean_accept_length is not None and accept_lengths is None:
        forced = [mean_accept_length]
    else:
        raise ValueError(
            f"accept_lengths: expected either mean_accept_length or accept_lengths, got {mean_accept_length} "
            f"and {accept_lengths}; pass one of them"
        )
    if not forced:
        raise ValueError(
            "accept_lengths: expected at least one length, got none; pass (0,) to accept nothing"
        )
    for length in forced:
        if not 0 <= length <= draft_length:
            raise ValueError(
                f"accept_lengths: expected 0 to {draft_length}, got {length}; raise draft_length"
            )
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed: expected 0 to 2^32 - 1, got {seed}")
    return Simulated(
        draft_length=draft_length,
        mean=mean_accept_length,
        accept_lengths=() if accept_lengths is None else tuple(accept_lengths),
        seed=seed,
    )
