"""What a draft adds to an EAGLE drafter's pages: rows of the branches that grow, for this draft only."""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jspec.targets.config import DecoderConfig
from jspec.targets.layers import See, paged
from pallas_kernels.attention.pages import Pages
from pallas_kernels.attention.sight import Sight
from pallas_kernels.pytree import pytree


@pytree
class Rollout:
    """Rows of a draft so far, per lane in the order that they were grown."""

    states: Float[Array, "lanes rows hidden"]  # of the last depth, as the step returned them
    keys: Float[Array, "layers lanes in_flight kv_heads head_size"]
    values: Float[Array, "layers lanes in_flight kv_heads head_size"]

    @classmethod
    def start(
        cls, states: Float[Array, "lanes hidden"], decoder: DecoderConfig, dtype: DTypeLike
    ) -> "Rollout":
        """Nothing in flight yet; `states` are those of the lanes' last pairs."""
        shape = (decoder.num_layers, states.shape[0], 0, decoder.stored_kv_heads, decoder.head_size)
        return cls(states=states[:, None], keys=jnp.zeros(shape, dtype), values=jnp.zeros(shape, dtype))

    def extended(
        self,
        states: Float[Array, "queries hidden"],
        keys: Float[Array, "layers queries kv_heads head_size"],
        values: Float[Array, "layers queries kv_heads head_size"],
    ) -> "Rollout":
        """With one more depth, whose rows come lane after lane."""
        layers, lanes = self.keys.shape[:2]
        return dataclasses.replace(
            self,
            states=states.reshape(lanes, -1, states.shape[1]),
            keys=jnp.concatenate([self.keys, keys.reshape(layers, lanes, -1, *keys.shape[2:])], axis=2),
            values=jnp.concatenate(
                [self.values, values.reshape(layers, lanes, -1, *values.shape[2:])], axis=2
            ),
        )

    def see(self, decoder: DecoderConfig, pages: Pages, layer: int, sight: Sight) -> See:
        """Attention of one more depth in a layer: over the pages, the rows so far and its own rows."""
        attend = paged(decoder, pages, layer, sight)

        def over_all(q: Array, k: Array, v: Array) -> Array:
            return attend(q, _behind(self.keys[layer], k), _behind(self.values[layer], v))

        return over_all


def _behind(
    before: Float[Array, "lanes in_flight kv_heads head_size"],
    new: Float[Array, "queries kv_heads head_size"],
) -> Float[Array, "keys kv_heads head_size"]:
    lanes = before.shape[0]
    joined = jnp.concatenate([before, new.reshape(lanes, -1, *new.shape[1:])], axis=1)
    return joined.reshape(-1, *new.shape[1:])
