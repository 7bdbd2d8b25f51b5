"""What a training step is given: tokens, masks and captured features of several documents."""

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
