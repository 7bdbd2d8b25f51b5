"""The read-only view of a target that drafters are given."""

from jaxtyping import Array, Float, Int

from jspec.cache import Cache
from jspec.targets.target import Target
from pallas_kernels.pytree import pytree, static


@pytree
class TargetView:
    """The target's shared arrays: passed, never copied."""

    params: tuple[Array, ...]
    cache: Cache
    target: Target = static()

    def embed(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """The target's input embedding of `ids`, with the target's embedding scale applied."""
        return self.target.embed(self.params, ids)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]:
        """The target's head on post-norm hidden states, float32, with its scale and soft cap applied."""
        return self.target.logits(self.params, hidden)
