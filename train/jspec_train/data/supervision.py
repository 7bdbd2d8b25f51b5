"""How much of a sample is trained on, and whether that is enough."""

import numpy as np


def longest_run(loss_mask: np.ndarray) -> int:
    """Length of the longest stretch of trained tokens.

    Args:
      loss_mask: bool [length].
    """
    padded = np.concatenate([[False], np.asarray(loss_mask, np.bool_), [False]])
    edges = np.flatnonzero(padded[1:] != padded[:-1])
    return int(np.max(edges[1::2] - edges[::2], initial=0))
