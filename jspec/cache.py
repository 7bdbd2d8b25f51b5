"""Committed tokens only: layer groups, their pages, and the one place that adds to them.

`execute` reads the cache and returns what its nodes would add; `commit` adds what was accepted.
So a rejected token never enters, nothing is ever rolled back, and the state is a function of the
committed tokens.
"""

import dataclasses

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jspec.heads import commit_rows
from pallas_kernels.attention.pages import Pages, allocate
from pallas_kernels.pytree import pytree


@dataclasses.dataclass(frozen=True, kw_only=True)
class GroupLayout:
    """The layers that share one pool and one page table."""

    num_layers: int
    num_kv_heads: int
    head_size: int
    window: int | None = None  # None = the whole context stays; w = a query sees itself and w - 1 before it


@pytree
class Group:
    """One layer group: a stacked pool and the pages that each slot owns in it.

    A window group repeats a short list of pages along its row (a ring), so that readers find the
    page of position p in column p // page_size whatever the group's kind.
    """

    pages: Pages
    page_table: Int[Array, "slots columns"]


@pytree
class Pending:
    """Keys and values of a round's nodes for one group: not yet in the cache."""

    k: Float[Array, "layers nodes kv_heads head_size"]
    v: Float[Array, "layers nodes kv_heads head_size"]


@pytree
class Cache:
    """All groups of a target. Group 0 holds the whole context; drafters follow its page table."""

    groups: tuple[Group, ...]
    lengths: Int[Array, "slots"]  # committed tokens per slot


def new_cache(
    layouts: tuple[GroupLayout, ...],
    *,
    max_slots: int,
    num_pages: tuple[int, ...],
    page_size: int,
    max_context: int,
    dtype: DTypeLike,
) -> Cache:
    """An empty cache whose slots own no pages yet (their table rows point at page 0 and length is 0).

    Args:
      layouts: one per group; group 0 must have window None.
      max_slots: rows of state, one per running request.
      num_pages: pages in each group's pool.
      page_size: tokens per page.
      max_context: tokens a slot may hold; sets the width of the page tables.
      dtype: of keys and values.
    """
    columns = -(-max_context // page_size)
    groups = tuple(
        Group(
            pages=allocate(
                num_layers=layout.num_layers,
                num_pages=pages,
                page_size=page_size,
                num_kv_heads=layout.num_kv_heads,
                head_size=layout.head_size,
                dtype=dtype,
            ),
            page_table=jnp.zeros((max_slots, columns), jnp.int32),
        )
        for layout, pages in zip(layouts, num_pages, strict=True)
    )
    return Cache(groups=groups, lengths=jnp.zeros((max_slots,), jnp.int32))


def commit(
    cache: Cache,
    pending: tuple[Pending, ...],
    path: Int[Array, "lanes commits"],
    lanes: Int[Array, "lanes"],
) -> Cache:
    """Adds the accepted nodes of a round.

    Args:
      cache: donated by the caller; not to be read again.
      pending: one per group, in the groups' order, for all nodes of the round.
      path: index into the round's nodes of the token that becomes the lane's i-th new one; -1 = none,
        and nothing follows a -1.
      lanes: slot of each lane, -1 for padding (whose path must be all -1).
    """
    max_slots = cache.lengths.shape[0]
    rows = jnp.maximum(lanes, 0)
    lengths = cache.lengths[rows]
    groups = tuple(
        Group(
            pages=commit_rows(group.pages, new.k, new.v, path, group.page_table[rows], lengths),
            page_table=group.page_table,
        )
        for group, new in zip(cache.groups, pending, strict=True)
    )
    committed = jnp.sum(path >= 0, axis=1, dtype=jnp.int32)
    slots = jnp.where(lanes >= 0, lanes, max_slots)
    return Cache(groups=groups, lengths=cache.lengths.at[slots].add(committed, mode="drop"))
