"""What an objective reads of the target: two frozen tables."""

from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, Float, Int

from jspec.targets.target import Target
from pallas_kernels.pytree import pytree, static


@runtime_checkable
class Tables(Protocol):
    """Embedding and head of a target. No gradient flows into them."""

    def embed(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """What the target's first layer reads."""
        ...

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]:
        """Float32 scores."""
        ...


@pytree
class FrozenTarget:
    """The `Tables` of a loaded target."""

    params: tuple[Array, ...]
    target: Target = static()

    def embed(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """The target's input embedding, scaled."""
        return self.target.embed(jax.lax.stop_gradient(self.params), ids)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]:
        """The target's head, with its soft cap."""
        return self.target.logits(jax.lax.stop_gradient(self.params), hidden)
