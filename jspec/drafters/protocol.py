"""What every drafter is: three pure functions over explicit state, and a few declared facts."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Bool, Float, Int

from jspec.round import Proposal
from jspec.sampling import SamplingTable
from jspec.targets.view import TargetView
from pallas_kernels.pytree import pytree


@pytree
class Text:
    """The tokens of every slot: prompt and emitted ones, the anchor (last emitted) included."""

    tokens: Int[Array, "slots capacity"]
    lengths: Int[Array, "slots"]  # tokens known; the anchor is the last of them


@pytree
class Committed:
    """What a round added, for all lanes, as `absorb` sees it."""

    features: Float[Array, "nodes features"]  # of every node of the round, in the order the drafter asked for
    positions: Int[Array, "nodes"]
    path: Int[Array, "lanes commits"]  # index into nodes of the lane's i-th new token; -1 = none
    context_lengths: Int[Array, "lanes"]  # committed tokens before this round
    # The request had emitted no token on its slot: what is kept per slot may be another request's.
    is_first: Bool[Array, "lanes"]


@runtime_checkable
class Drafter(Protocol):
    """A drafting method with its static choices closed over; arrays are arguments.

    `state` has `max_slots` rows (or follows the target's page table), never the bucket's shape.

    The prefix cache hands whole pages of a text from one request to another. So what a page holds at index t
    may depend on the tokens up to t + 1 and on nothing else; and what is kept per slot must follow from the
    pages, the text and the last committed token, which every request executes for itself.
    """

    @property
    def name(self) -> str:
        """What tables and messages call it."""
        ...

    @property
    def draft_length(self) -> int:
        """Draft tokens per proposal (its static width), anchor not counted."""
        ...

    @property
    def draft_depth(self) -> int:
        """Draft tokens on the longest path: draft_length for chains, less for trees."""
        ...

    @property
    def features(self) -> tuple[str, ...]:
        """Hidden states it needs, in order: "embedding", "layer.3", "final_norm"."""
        ...

    @property
    def simulated(self) -> bool:
        """Whether accept lengths are forced, so that the text is not the target's."""
        ...

    def init(self, params: Any, target: TargetView, max_slots: int) -> Any:
        """Empty state; raises ValueError, naming both sides, if it cannot serve this target."""
        ...

    def draft(
        self,
        params: Any,
        target: TargetView,
        state: Any,
        lanes: Int[Array, "lanes"],
        text: Text,
        sampling: SamplingTable,
    ) -> Proposal:
        """Proposes up to draft_length tokens after each lane's anchor. Donates nothing."""
        ...

    def absorb(
        self,
        params: Any,
        target: TargetView,
        state: Any,
        lanes: Int[Array, "lanes"],
        text: Text,
        committed: Committed,
    ) -> tuple[Any, Int[Array, "lanes"]]:
        """Takes in the committed tokens; `text` already holds what the round emitted.

        Returns the state, and per lane how many draft tokens the next `draft` will have at most,
        so that the host can pick the next bucket from the report it reads anyway.
        """
        ...
