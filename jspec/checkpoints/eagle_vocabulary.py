"""The reduced vocabulary of a drafter as checkpoints store it: d2t and t2d.

d2t holds differences: target id = draft id + d2t[draft id]. t2d is the mask of target ids that are drafted.
"""

import numpy as np


def ids_of_differences(d2t: np.ndarray) -> np.ndarray:
    """Target id of every draft id."""
    return np.asarray(d2t, np.int64) + np.arange(len(d2t), dtype=np.int64)


def differences_of_ids(ids: np.ndarray) -> np.ndarray:
    """d2t of ascending target ids."""
    return np.asarray(ids, np.int64) - np.arange(len(ids), dtype=np.int64)


def mask_of_ids(ids: np.ndarray, vocab_size: int) -> np.ndarray:
    """t2d of target ids."""
    mask = np.zeros((vocab_size,), np.bool_)
    mask[ids] = True
    return mask


def checked_ids(
    where: str, d2t: np.ndarray, t2d: np.ndarray | None, draft_vocab_size: int, vocab_size: int
) -> np.ndarray:
    """The target ids of a mapping, ascending.

    Args:
      where: names the mapping in errors.
      d2t: differences.
      t2d: the mask, if there is one.
      draft_vocab_size: ids that are drafted.
      vocab_size: of the target.

    Raises:
      ValueError: a wrong length, an id out of range, repeated or out of order, or a mask that names others.
    """
    if d2t.shape != (draft_vocab_size,):
        raise ValueError(
            f"{where}: expected {draft_vocab_size} entries in 'd2t', as draft_vocab_size says, got shape "
            f"{list(d2t.shape)}; config and weights do not belong together"
        )
    ids = ids_of_differences(d2t)
    outside = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(outside):
        first = int(outside[0])
        raise ValueError(
            f"{where}: expected target ids 0 to {vocab_size - 1} from 'd2t', got {ids[first]} (draft id {first} + "
            f"{int(d2t[first])}), and {len(outside) - 1} more outside; the mapping is another vocabulary's"
        )
    steps = np.flatnonzero(ids[1:] <= ids[:-1])
    if len(steps):
        first = int(steps[0])
        what = "each target id once" if ids[first + 1] == ids[first] else "ascending target ids"
        raise ValueError(
            f"{where}: expected {what} from 'd2t', got {ids[first]} for draft id {first} and {ids[first + 1]} for "
            f"{first + 1}; d2t holds differences: target id - draft id"
        )
    if t2d is None:
        return ids
    if t2d.shape != (vocab_size,):
        raise ValueError(
            f"{where}: expected {vocab_size} entries in 't2d', got shape {list(t2d.shape)}; "
            "the mapping is another vocabulary's"
        )
    masked = np.flatnonzero(t2d)
    if not np.array_equal(masked, ids):
        different = np.setxor1d(masked, ids)
        raise ValueError(
            f"{where}: expected 't2d' to be true for the {len(ids)} ids of 'd2t', got {len(masked)} that differ in "
            f"{len(different)}, the first {int(different[0])}; the two are of different mappings"
        )
    return ids
