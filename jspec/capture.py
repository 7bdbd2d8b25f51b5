"""What a frozen target computes for whole texts: the features that a drafter is trained on.

The same `Target.forward` that decodes, with an empty cache: capture is a prefill without a head. Every text
is run on its own, padded to a size that its own length decides, so that its features depend on nothing else:
not on the rows beside it, their order, or how many are captured at once.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int

from jspec.cache import Cache, Group, commit, new_cache
from jspec.features import FeatureContract, feature_contract
from jspec.objectives.batch import TrainBatch
from jspec.pages import PagePool
from jspec.round import Nodes
from jspec.targets.target import Hidden, Target

BUCKETS = (64, 128, 192, 256, 320, 384, 512, 768, 1024)
DTYPES = ("float32", "bfloat16")
_PAGE_SIZE = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Capture:
    """Which states of which target are captured, and in which sizes. Hashable; arrays are arguments.

    A text of up to `buckets[-1]` tokens is executed at once, at the smallest bucket that holds it. A longer
    one is executed in pieces of `buckets[-1]` tokens, each of which sees the ones before it through a cache,
    as in a chunked prefill: memory then grows with the piece.
    """

    target: Target
    names: tuple[str, ...]  # see `jspec.features.layer_outputs`; side by side in this order
    dtype: str = "bfloat16"  # of the features, whatever the target computes in
    buckets: tuple[int, ...] = BUCKETS

    def __post_init__(self) -> None:
        """Refuses what cannot be captured.

        Raises:
          ValueError: naming the argument.
        """
        if not self.names:
            raise ValueError('names: expected at least one state, got none; pass "layer.1", for instance')
        if self.dtype not in DTYPES:
            raise ValueError(
                f"dtype: expected one of {', '.join(DTYPES)}, got {self.dtype!r}; pick one of these"
            )
        if not self.buckets or list(self.buckets) != sorted(set(self.buckets)) or self.buckets[0] < 1:
            raise ValueError(f"buckets: expected ascending positive sizes, got {self.buckets}; sort them")
        _ = self.contract

    @property
    def contract(self) -> FeatureContract:
        """What the features hold."""
        return feature_contract(self.target, self.names, self.dtype)

    def sizes(self, longest: int) -> tuple[int, ...]:
        """The padded lengths that texts of up to `longest` tokens come in: one program each."""
        piece = self.buckets[-1]
        if longest > piece:
            return (*self.buckets, -(-longest // piece) * piece)
        return self.buckets[: int(np.searchsorted(self.buckets, longest)) + 1]

    def one(self, params: Any, ids: Int[Array, "size"], length: Int[Array, ""]) -> Float[Array, "size width"]:
        """Features of a single text.

        Args:
          params: the target's leaves.
          ids: the text and padding, in one of `sizes`; which one must follow from `length`.
          length: tokens of the text; features behind it are 0.
        """
        size, piece = ids.shape[0], self.buckets[-1]
        if size <= piece:
            out = self._execute(params, ids, jnp.int32(0), length, self._cache(params, 1))
            features = out.features.astype(self.dtype)
        else:
            features = self._in_pieces(params, ids, length)
        return jnp.where(jnp.arange(size)[:, None] < length, features, 0)

    def any_length(
        self, params: Any, ids: Int[Array, "tokens"], length: Int[Array, ""]
    ) -> Float[Array, "tokens width"]:
        """As `one`, for a text padded to any length: the right size is chosen on the device."""
        tokens = ids.shape[0]
        sizes = self.sizes(tokens)

        def at(size: int) -> Any:
            return lambda: _fit(self.one(params, _fit(ids, size), length), tokens)

        chosen = jnp.searchsorted(jnp.array(sizes), length)
        return jax.lax.switch(chosen, [at(size) for size in sizes])

    def rows(
        self, params: Any, ids: Int[Array, "rows tokens"], segments: Int[Array, "rows tokens"]
    ) -> Float[Array, "rows tokens width"]:
        """Features of rows that hold several texts one after the other, each captured on its own.

        Args:
          params: the target's leaves.
          ids: tokens.
          segments: 1, 2, ... for the texts of a row in order; 0 for padding, whose features are 0.
        """
        tokens = ids.shape[1]
        width = self.contract.width

        def one_row(row: tuple[Array, Array]) -> Array:
            text, segment = jnp.pad(row[0], (0, tokens)), row[1]

            def add(number: Array, out: Array) -> Array:
                mine = segment == number
                start, length = jnp.argmax(mine), jnp.sum(mine, dtype=jnp.int32)
                piece = jax.lax.dynamic_slice_in_dim(text, start, tokens)
                features = self.any_length(params, piece, length)
                before = jax.lax.dynamic_slice_in_dim(out, start, tokens)
                kept = jnp.where(jnp.arange(tokens)[:, None] < length, features, before)
                return jax.lax.dynamic_update_slice_in_dim(out, kept, start, axis=0)

            out = jnp.zeros((2 * tokens, width), self.dtype)
            return jax.lax.fori_loop(1, jnp.max(segment) + 1, add, out)[:tokens]

        return jax.lax.map(one_row, (ids, segments))

    def batch(self, params: Any, batch: TrainBatch, mesh: Mesh | None = None) -> TrainBatch:
        """A training batch with its features filled in; `batch.features` is not read.

        Args:
          params: the target's leaves.
          batch: rows of texts.
          mesh: each device along its `data` axis captures its own rows; None = one device.
        """
        rows = self.rows
        if mesh is not None:
            whole, split = PartitionSpec(), PartitionSpec("data")
            rows = jax.shard_map(
                self.rows,
                mesh=mesh,
                in_specs=(whole, split, split),
                out_specs=split,
                axis_names={"data"},
                check_vma=False,
            )
        return dataclasses.replace(batch, features=rows(params, batch.ids, batch.segments))

    def _in_pieces(self, params: Any, ids: Array, length: Array) -> Array:
        size, piece = ids.shape[0], self.buckets[-1]
        index = jnp.arange(piece, dtype=jnp.int32)

        def add(number: Array, state: tuple[Cache, Array]) -> tuple[Cache, Array]:
            cache, features = state
            start = number * piece
            count = jnp.minimum(length - start, piece)
            tokens = jax.lax.dynamic_slice_in_dim(ids, start, piece)
            out = self._execute(params, tokens, start, count, cache)
            path = jnp.where(index < count, index, -1)
            cache = commit(cache, out.pending, path[None], jnp.zeros((1,), jnp.int32))
            new = out.features.astype(self.dtype)
            return cache, jax.lax.dynamic_update_slice_in_dim(features, new, start, axis=0)

        state = self._cache(params, size), jnp.zeros((size, self.contract.width), self.dtype)
        return jax.lax.fori_loop(0, -(-length // piece), add, state)[1]

    def _execute(self, params: Any, ids: Array, start: Array, count: Array, cache: Cache) -> Hidden:
        index = jnp.arange(ids.shape[0], dtype=jnp.int32)
        nodes = Nodes(
            tokens=ids,
            positions=start + index,
            offsets=jnp.stack([jnp.int32(0), count.astype(jnp.int32)]),
            certain_lengths=count.astype(jnp.int32)[None],
        )
        lanes = jnp.zeros((1,), jnp.int32)
        return self.target.forward(params, nodes, cache, lanes, self.names, max_queries=ids.shape[0])

    def _cache(self, params: Any, tokens: int) -> Cache:
        """An empty cache that owns pages for `tokens`, in the dtype that the target computes in."""
        dtype = jax.eval_shape(self.target.embed, params, jnp.zeros((1,), jnp.int32)).dtype
        pool = PagePool(
            self.target.groups,
            page_size=_PAGE_SIZE,
            max_context=tokens,
            max_commit=min(tokens, self.buckets[-1]),
            max_slots=1,
        )
        reserved = pool.reserve(tokens)
        assert reserved is not None
        cache = new_cache(
            self.target.groups,
            max_slots=1,
            num_pages=pool.num_pages,
            page_size=_PAGE_SIZE,
            max_context=tokens,
            dtype=dtype,
        )
        groups = tuple(
            Group(pages=group.pages, page_table=jnp.asarray(row)[None])
            for group, row in zip(cache.groups, pool.table_rows(reserved), strict=True)
        )
        return Cache(groups=groups, lengths=cache.lengths)


def capture(
    target: Target,
    params: Any,
    ids: Int[Array | np.ndarray, "samples tokens"],
    lengths: Int[Array | np.ndarray, "samples"],
    names: tuple[str, ...],
    *,
    dtype: str = "bfloat16",
    buckets: tuple[int, ...] = BUCKETS,
) -> Float[Array, "samples tokens width"]:
    """Features of several texts, one after the other; pure, so it may be a part of a larger program.

    Args:
      target: static.
      params: its leaves.
      ids: a text and padding per row.
      lengths: tokens of each text; features behind it are 0.
      names: states to capture, side by side in this order.
      dtype: of the features.
      buckets: see `Capture`; features of equal texts are equal bit for bit for equal buckets.

    Raises:
      ValueError: as for `Capture`.
    """
    chosen = Capture(target=target, names=names, dtype=dtype, buckets=buckets)
    return jax.lax.map(lambda row: chosen.any_length(params, *row), (jnp.asarray(ids), jnp.asarray(lengths)))


@functools.partial(jax.jit, static_argnames="chosen")
def capture_one(
    chosen: Capture, params: Any, ids: Int[Array | np.ndarray, "size"], length: Int[Array | np.ndarray, ""]
) -> Float[Array, "size width"]:
    """`Capture.one`, compiled once per size."""
    return chosen.one(params, jnp.asarray(ids), jnp.asarray(length))


def _fit(rows: Array, size: int) -> Array:
    """Cut or padded with zeros to `size` rows."""
    return jnp.pad(rows[:size], [(0, max(size - rows.shape[0], 0))] + [(0, 0)] * (rows.ndim - 1))
