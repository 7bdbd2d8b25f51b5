"""Plain decoding: the same engine with nothing proposed."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.drafters.protocol import Committed, Text
from jspec.round import OneHot, Proposal
from jspec.sampling import SamplingTable
from jspec.targets.view import TargetView


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain:
    """A drafter that never proposes. It has no parameters and no state, and so costs nothing."""

    name: str = "plain"
    draft_length: int = 0
    draft_depth: int = 0
    features: tuple[str, ...] = ()
    simulated: bool = False

    def init(self, params: tuple[()], target: TargetView, max_slots: int) -> tuple[()]:
        """Nothing to keep; serves any target."""
        return ()

    def draft(
        self,
        params: tuple[()],
        target: TargetView,
        state: tuple[()],
        lanes: Int[Array, "lanes"],
        text: Text,
        sampling: SamplingTable,
    ) -> Proposal:
        """A proposal of width 0."""
        return Proposal(
            tokens=jnp.zeros((lanes.shape[0], 0), jnp.int32),
            lengths=jnp.zeros_like(lanes),
            q=OneHot(),
        )

    def absorb(
        self,
        params: tuple[()],
        target: TargetView,
        state: tuple[()],
        lanes: Int[Array, "lanes"],
        text: Text,
        committed: Committed,
    ) -> tuple[tuple[()], Int[Array, "lanes"]]:
        """Keeps nothing; the next draft will have no tokens."""
        return state, jnp.zeros_like(lanes)


def plain() -> Plain:
    """The drafter that proposes nothing."""
    return Plain()
