"""What a training step is given: tokens, masks and captured features of several documents."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Array, Bool, Float, Int

from pallas_kernels.pytree import pytree


@pytree
class TrainBatch:
    """Rows of tokens. A row holds one document and padding, or several documents one after the other."""

    ids: Int[Array | np.ndarray, "rows tokens"]
    loss_mask: Bool[
        Array | np.ndarray, "rows tokens"
    ]  # tokens that the target wrote: what a drafter learns to predict
    segments: Int[Array | np.ndarray, "rows tokens"]  # 1, 2, ...: documents of the row in order; 0: padding
    positions: Int[Array | np.ndarray, "rows tokens"]  # of the token in its document
    features: Float[
        Array | np.ndarray, "rows tokens width"
    ]  # target states of each token, as the contract orders them

    @classmethod
    def of_host(cls, arrays: Mapping[str, Any]) -> "TrainBatch":
        """A batch of a dict of numpy arrays; without "features", they are of width 0, to be captured."""
        names = ("ids", "loss_mask", "segments", "positions")
        features = arrays.get("features")
        if features is None:
            features = np.zeros((*arrays["ids"].shape, 0), np.float32)
        return cls(**{name: arrays[name] for name in names}, features=features)
