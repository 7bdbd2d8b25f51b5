"""What grammars allow after every node of a round, as `settle` takes it."""

import numpy as np
from jaxtyping import Array, Bool, Int

from pallas_kernels.pytree import pytree


@pytree
class Masks:
    """One row per row of logits."""

    # Bit id % 32 of word id // 32 is set where the id may come next; all ones where the request has no
    # grammar.
    allowed: Int[Array | np.ndarray, "rows words"]
    ends: Bool[Array | np.ndarray, "rows"]  # an answer that comes there ends there
