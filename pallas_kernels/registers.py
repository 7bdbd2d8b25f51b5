"""Vector registers of a TPU, 8 rows of 128 numbers, and what they ask of a kernel's memory on the chip."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import tpu as pltpu

LANES = 128  # numbers of a register's row


def split_width(width: int) -> tuple[int, int]:
    """How many parts a row is kept in, and how wide each is.

    A row at a traced place can be stored where the array is one register wide, and nowhere else.
    """
    parts = -(-width // LANES)
    return parts, width // parts


def store_parts(ref: Any, h: Any, rows: Any, values: jax.Array) -> None:
    """Writes rows of head `h` of a ref [heads, parts, rows, width]."""
    width = ref.shape[-1]
    for part in range(ref.shape[1]):
        ref[h, part, rows, :] = values[:, part * width : (part + 1) * width]


def load_parts(ref: Any, h: Any) -> jax.Array:
    """All rows of head `h` of a ref [heads, parts, rows, width]."""
    return joined([ref[h, part] for part in range(ref.shape[1])])


def joined(parts: list[jax.Array]) -> jax.Array:
    """Parts of rows, side by side."""
    return jnp.concatenate(parts, axis=1) if len(parts) > 1 else parts[0]


def padded_bytes(buffer: Any) -> int:
    """What a buffer takes on the chip, where rows are filled up to whole registers."""
    if buffer is None or getattr(buffer, "memory_space", None) is not pltpu.VMEM:
        return 0
    *outer, rows, columns = buffer.shape
    itemsize = jnp.dtype(buffer.dtype).itemsize
    row_tile = 32 // itemsize
    return math.prod(outer) * -(-rows // row_tile) * row_tile * -(-columns // LANES) * LANES * itemsize
