"""What a training step is given: tokens, masks and captured features of several documents."""

from collections.abc import Mapping, Sequence
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


def check_features(batch: TrainBatch, names: Sequence[str], width: int) -> None:
    """Makes sure that a batch has the features that an objective reads.

    Args:
      batch: of features side by side.
      names: of the states, in order.
      width: of one.

    Raises:
      ValueError: the features have another width.
    """
    given = batch.features.shape[2]
    if given != len(names) * width:
        raise ValueError(
            f"features: expected width {len(names) * width} ({', '.join(names)}; {width} each), got {given}; "
            "capture these states"
        )


def split_features(
    batch: TrainBatch, names: Sequence[str], width: int
) -> tuple[Float[Array, "rows tokens read"], Float[Array, "rows tokens width"]]:
    """The states that a drafter reads, and the last one, which the target's head reads.

    Arguments and errors are those of `check_features`.
    """
    check_features(batch, names, width)
    return batch.features[:, :, :-width], batch.features[:, :, -width:]
