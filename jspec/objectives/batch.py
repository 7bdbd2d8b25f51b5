"""What a training step is given: tokens, masks and captured features of several documents."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pytree import pytree


@pytree
class TrainBatch:
    """Rows of tokens. A row holds one document and padding, or several documents one after the other."""

    ids: Int[Array, "rows tokens"]
    loss_mask: Bool[Array, "rows tokens"]  # tokens that the target wrote: what a drafter learns to predict
    segments: Int[Array, "rows tokens"]  # 1, 2, ...: documents of the row in order; 0: padding
    positions: Int[Array, "rows tokens"]  # of the token in its document
    features: Float[Array, "rows tokens width"]  # target states of each token, as the contract orders them


def on_devices(arrays: Mapping[str, Any], sharding: jax.sharding.Sharding | None = None) -> TrainBatch:
    """A batch of numpy arrays, under the names of its fields; other entries are left out.

    Args:
      arrays: without "features", these are of width 0: to be captured.
      sharding: of the rows; None = the default device.
    """
    features = arrays.get("features")
    if features is None:
        features = np.zeros((*arrays["ids"].shape, 0), np.float32)
    names = ("ids", "loss_mask", "segments", "positions")
    return TrainBatch(
        **{name: jax.device_put(arrays[name], sharding) for name in names},
        features=jax.device_put(features, sharding),
    )
