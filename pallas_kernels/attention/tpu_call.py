"""The references of the TPU kernel of attention, by where they are."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.attention.tiling import Tiling


class Scalars(NamedTuple):
    """What the kernel's loops are bounded by, in scalar memory."""

    layer: Any  # [1]
    query_offsets: Any
    key_offsets: Any
    page_table: Any
    context_lengths: Any
    first_visible: Any
    causal: Any  # [lanes], 0 or 1


class Arrays(NamedTuple):
    """Operands in HBM, but for visible [queries, words] and sinks [heads, 128], which are in VMEM."""

    q: Any
    k_new: Any
    v_new: Any
    k_pool: Any
    v_pool: Any
    visible: Any
    sinks: Any


class Results(NamedTuple):
    """In HBM."""

    out: Any
    logsumexp: Any  # [queries, heads, 128], equal along the last axis; None if not asked for


class Scratch(NamedTuple):
    """Memory on the chip; first axes of 2 are double buffers, `rows` are as in the reference's Tile."""

    q: Any  # [2, queries, heads, head_size]
    k_new: Any  # [2, keys, kv_heads, head_size]
    v_new: Any
    k_pages: Any  # [2, block_pages, kv_heads, head_size, page_size]
    v_pages: Any  # [2, block_pages, kv_heads, page_size, value_size]
    q_rows: Any  # [kv_heads, parts, rows, part of head_size] float32; see `split_width`
    k_rows: Any  # [kv_heads, parts, keys, part of head_size] float32
    v_rows: Any  # [kv_heads, parts, keys, part of value_size] float32, 0 where no key is
    out_rows: Any  # [kv_heads, parts, rows, part of value_size] float32
    first_visible: Any  # [rows, 128], equal along the last axis
    seen: Any  # [rows, keys] int32
    maximum: Any  # [kv_heads, rows, 128] float32, equal along the last axis
    total: Any
    weighted: Any  # [kv_heads, rows, value_size] float32
    by_head: Any  # [heads, value_size] float32
    out: Any  # [queries, heads, value_size]
    logsumexp: Any  # [queries, heads, 128] or None
    inputs_arrived: Any  # [2, 3] semaphores: q, k_new, v_new
    pages_arrived: Any  # [2, 2]: k, v
    results_left: Any  # [2]: out, logsumexp


class Call(NamedTuple):
    """One traced call: its references, and what is static about it."""

    scalars: Scalars
    arrays: Arrays
    results: Results
    scratch: Scratch
    tiling: Tiling
    operand: jnp.dtype  # of what products take
    scale: float
    softcap: float | None
    values_by_feature: bool

    @property
    def lanes(self) -> int:
        """Rows of the page table."""
        return self.scalars.page_table.shape[0]

    @property
    def num_queries(self) -> int:
        """Of all lanes, padding included."""
        return self.arrays.q.shape[0]

    @property
    def kv_heads(self) -> int:
        """Of the pool."""
        return self.arrays.k_pool.shape[2]

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.arrays.k_pool.shape[-1]

    @property
    def group(self) -> int:
        """Query heads per KV head."""
        return self.arrays.q.shape[1] // self.kv_heads

    @property
    def block(self) -> int:
        """Tokens of a block of pages."""
        return self.tiling.block_pages * self.page_size
