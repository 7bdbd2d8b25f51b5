"""How blocks and context are laid out for attention: tiles of whole blocks, kv heads in front.

A tile's row g * width + b * block_size + i is query head g (of the kv head's group) of row i of its block b.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from pallas_kernels.pytree import pytree

_ROWS = 128  # block rows of a tile: the numbers of a register's row
_TOKENS = 256  # context tokens of a tile
_PACKED = 16  # rows of a register of bfloat16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rules:
    """What is the same for all blocks."""

    scale: float
    block_size: int
    window: int | None  # of the context: the last positions that a row sees, its own included; None = all
    causal: bool  # in its own block a row sees itself and those before it, else all
    tight: int | None = None  # so many blocks fill a tile; None = registers, as kernels need it

    def tightened(self, num_blocks: int) -> "Rules":
        """For plain XLA, which computes what is padding too: tiles without any, unless blocks do not divide."""
        return dataclasses.replace(self, tight=min(num_blocks, self.tile_blocks))

    @property
    def tile_blocks(self) -> int:
        """Blocks of a tile."""
        return self.tight or max(1, _ROWS // self.block_size)

    @property
    def tile_rows(self) -> int:
        """Rows of a tile for one query head; what its blocks do not fill is padding."""
        rows = self.tile_blocks * self.block_size
        return rows if self.tight else -(-rows // _ROWS) * _ROWS

    def inside_of_block(self) -> np.ndarray:
        """Which rows of its block (the second axis) a row of it (the first) sees."""
        seen = np.ones((self.block_size, self.block_size), np.bool_)
        return np.tril(seen) if self.causal else seen

    def inside(self) -> np.ndarray:
        """Which rows of a tile (the second axis) a row of it (the first) sees: those of its block."""
        number = np.arange(self.tile_rows)
        block, row = number // self.block_size, number % self.block_size
        return (block[:, None] == block[None]) & self.inside_of_block()[row[:, None], row[None]]


@pytree
class Laid:
    """Blocks and context in tiles."""

    q: Float[Array, "rows kv_heads tiles queries head_size"]
    k: Float[Array, "rows kv_heads tiles keys head_size"]
    v: Float[Array, "rows kv_heads tiles keys value_size"]
    k_context: Float[Array, "rows kv_heads tokens head_size"]  # filled up to whole tiles
    v_context: Float[Array, "rows kv_heads tokens value_size"]
    # Of the context, a query sees the tokens from first to before end.
    first: Int[Array, "rows tiles queries"]
    end: Int[Array, "rows tiles queries"]

    @property
    def tile_tokens(self) -> int:
        """Context tokens of a tile."""
        return min(self.k_context.shape[2], _TOKENS)

    def seen_tiles(self) -> tuple[Int[Array, "rows tiles"], Int[Array, "rows tiles"]]:
        """The first tile of the context that some query of a tile sees, and the one past the last."""
        seen = self.first < self.end
        end = jnp.max(jnp.where(seen, self.end, 0), axis=2)
        first = jnp.min(jnp.where(seen, self.first, end[..., None]), axis=2)
        return first // self.tile_tokens, -(-end // self.tile_tokens)


def lay_out(
    q: Float[Array, "rows blocks block heads head_size"],
    k: Float[Array, "rows blocks block kv_heads head_size"],
    v: Float[Array, "rows blocks block kv_heads value_size"],
    k_context: Float[Array, "rows tokens kv_heads head_size"],
    v_context: Float[Array, "rows tokens kv_heads value_size"],
    starts: Int[Array, "rows blocks"],
    anchors: Int[Array, "rows blocks"],
    rules: Rules,
) -> Laid:
    """See `pallas_kernels.block_attention.api.attend_blocks` for the arguments."""
    kv_heads, tokens = k.shape[3], k_context.shape[1]
    first = jnp.broadcast_to(starts[:, :, None], q.shape[:3])
    end = jnp.broadcast_to(anchors[:, :, None], q.shape[:3])
    if rules.window is not None:
        row = jax.lax.broadcasted_iota(jnp.int32, q.shape[:3], 2)
        first = jnp.maximum(first, end + row - (rules.window - 1))
    rounded = -(-tokens // _PACKED) * _PACKED if tokens <= _TOKENS else -(-tokens // _TOKENS) * _TOKENS

    def context(array: Array) -> Array:
        return jnp.pad(array, ((0, 0), (0, rounded - tokens), (0, 0), (0, 0))).swapaxes(1, 2)

    def limits(array: Array) -> Array:
        return jnp.tile(_tiles(array.astype(jnp.int32), rules), (1, 1, q.shape[3] // kv_heads))

    return Laid(
        q=as_tiles(q, kv_heads, rules),
        k=as_tiles(k, kv_heads, rules),
        v=as_tiles(v, kv_heads, rules),
        k_context=context(k_context),
        v_context=context(v_context),
        first=limits(first),
        end=limits(end),
    )


def as_tiles(
    array: Float[Array, "rows blocks block heads size"], kv_heads: int, rules: Rules
) -> Float[Array, "rows kv_heads tiles queries size"]:
    """What there is of every query, or key, as `Laid` has it."""
    tiled = _tiles(array, rules).reshape(*_tiles_shape(array, rules), kv_heads, -1, array.shape[-1])
    tiled = tiled.transpose(0, 3, 1, 4, 2, 5)
    return tiled.reshape(*tiled.shape[:3], -1, array.shape[-1])


def as_blocks(
    out: Float[Array, "rows kv_heads tiles queries value_size"], num_blocks: int, rules: Rules
) -> Float[Array, "rows blocks block heads value_size"]:
    """Undoes `as_tiles`."""
    rows, kv_heads, tiles, queries, size = out.shape
    group = queries // rules.tile_rows
    out = out.reshape(rows, kv_heads, tiles, group, rules.tile_rows, size).transpose(0, 2, 4, 1, 3, 5)
    out = out[:, :, : rules.tile_blocks * rules.block_size]
    out = out.reshape(rows, -1, rules.block_size, kv_heads * group, size)
    return out[:, :num_blocks]


def _tiles_shape(array: Array, rules: Rules) -> tuple[int, int, int]:
    return array.shape[0], -(-array.shape[1] // rules.tile_blocks), rules.tile_rows


def _tiles(array: Any, rules: Rules) -> Array:
    """[rows, blocks, block, ...] as [rows, tiles, tile_rows, ...]; what is missing is 0."""
    rows, tiles, width = _tiles_shape(array, rules)
    rest = array.shape[3:]
    blocks = tiles * rules.tile_blocks - array.shape[1]
    array = jnp.pad(array, [(0, 0), (0, blocks)] + [(0, 0)] * (array.ndim - 2))
    array = array.reshape(rows, tiles, rules.tile_blocks * rules.block_size, *rest)
    return jnp.pad(array, [(0, 0), (0, 0), (0, width - array.shape[2])] + [(0, 0)] * len(rest))
