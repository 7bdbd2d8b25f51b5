"""What the decode programs need of a target model, whatever its architecture."""

from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int

from jspec.cache import Cache, GroupLayout, Pending
from jspec.round import Nodes
from pallas_kernels.pytree import pytree


@pytree
class Hidden:
    """A target pass before its head."""

    hidden: Float[Array, "nodes hidden"]  # after the final norm: what the head reads
    features: Float[Array, "nodes features"]  # captured states side by side, in the order asked
    pending: tuple[Pending, ...]  # one per layer group


@runtime_checkable
class Target(Protocol):
    """A target model: static facts and three pure functions over its parameter leaves. Hashable."""

    @property
    def identity(self) -> str:
        """Architecture and sizes, to name it in refusals."""
        ...

    @property
    def vocab_size(self) -> int:
        """Ids are 0 .. vocab_size - 1."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the hidden state, and of each captured one."""
        ...

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens that one text may hold."""
        ...

    @property
    def groups(self) -> tuple[GroupLayout, ...]:
        """Layers that share a cache pool; the first group keeps the whole context."""
        ...

    def forward(
        self,
        params: Any,
        nodes: Nodes,
        cache: Cache,
        lanes: Int[Array, "lanes"],
        capture: tuple[str, ...],
        *,
        max_queries: int,
    ) -> Hidden:
        """Runs all layers over the round's nodes; the cache is only read.

        Args:
          params: the target's leaves.
          nodes: all lanes packed.
          cache: committed tokens of every slot.
          lanes: slot of each lane, -1 for padding.
          capture: names of the hidden states to return, in order: "embedding" (as layer 0 reads it),
            "layer.i" (output of decoder layer i, 0-based), "final_norm".
          max_queries: static bound on the nodes of one lane.
        """
        ...

    def embed(self, params: Any, ids: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]: ...

    def logits(self, params: Any, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]: ...
