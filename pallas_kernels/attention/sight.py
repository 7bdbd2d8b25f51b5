"""What every query of a round may look at; built once per round and shared by all layers."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.pytree import pytree, static


@pytree
class Sight:
    """Who sees what, for all queries of a round, lanes packed one after the other.

    Context: a query sees the rows p of its lane with first_visible <= p < context_lengths, where p
    is the row's position in the text and lies in page page_table[lane, p // page_size].

    In flight, with num_queries and num_keys those of the lane: on causal lanes query i sees key j
    iff j <= i + num_keys - num_queries and context_lengths + j >= first_visible[i]; on the others
    iff bit j % 32 of visible[i, j // 32] is set.
    """

    query_offsets: Int[Array, "bounds"]  # 0 first; lane l owns queries [l] .. [l + 1] - 1, in order
    key_offsets: Int[Array, "bounds"]  # the same for in-flight keys
    page_table: Int[Array, "lanes columns"]
    context_lengths: Int[Array, "lanes"]  # committed tokens
    first_visible: Int[Array, "queries"]  # lowest position in sight; 0 without a window
    causal: Bool[Array, "lanes"]
    visible: Int[Array, "queries words"]  # no words where every lane is causal
    max_queries: int = static()  # no lane has more queries
    max_keys: int = static()  # no lane has more in-flight keys


def first_in_window(positions: Int[Array, "queries"], window: int | None) -> Int[Array, "queries"]:
    """Lowest position that a query sees: itself and window - 1 before it; everything if window is None."""
    if window is None:
        return jnp.zeros_like(positions)
    return jnp.maximum(positions - (window - 1), 0)


def causal_sight(
    offsets: Int[Array, "bounds"],
    page_table: Int[Array, "lanes columns"],
    context_lengths: Int[Array, "lanes"],
    positions: Int[Array, "queries"],
    *,
    max_queries: int,
    window: int | None = None,
) -> Sight:
    """Chains and chunks: each node sees the context, the nodes before it and itself.

    Args:
      offsets: where each lane's nodes begin; they are both queries and keys.
      page_table: pages of each lane, in the order of its positions.
      context_lengths: committed tokens per lane.
      positions: of the nodes in the text; only read if there is a window.
      max_queries: no lane has more nodes.
      window: a node sees itself and window - 1 positions before it; None = all.
    """
    return Sight(
        query_offsets=offsets,
        key_offsets=offsets,
        page_table=page_table,
        context_lengths=context_lengths,
        first_visible=first_in_window(positions, window),
        causal=jnp.ones(context_lengths.shape, bool),
        visible=jnp.zeros((*positions.shape, 0), jnp.int32),
        max_queries=max_queries,
        max_keys=max_queries,
    )


def block_sight(
    offsets: Int[Array, "bounds"],
    page_table: Int[Array, "lanes columns"],
    context_lengths: Int[Array, "lanes"],
    positions: Int[Array, "queries"],
    *,
    max_queries: int,
    window: int | None = None,
) -> Sight:
    """Blocks whose nodes all see each other, and the context; arguments as in `causal_sight`.

    The window limits the context only: a block is seen whole.
    """
    words = -(-max_queries // 32)
    return Sight(
        query_offsets=offsets,
        key_offsets=offsets,
        page_table=page_table,
        context_lengths=context_lengths,
        first_visible=first_in_window(positions, window),
        causal=jnp.zeros(context_lengths.shape, bool),
        visible=jnp.full((*positions.shape, words), -1, jnp.int32),
        max_queries=max_queries,
        max_keys=max_queries,
    )


def tree_sight(
    offsets: Int[Array, "bounds"],
    page_table: Int[Array, "lanes columns"],
    context_lengths: Int[Array, "lanes"],
    positions: Int[Array, "queries"],
    parents: Int[Array, "queries"],
    *,
    max_queries: int,
    window: int | None = None,
) -> Sight:
    """Trees: each node sees the context, its ancestors and itself; other arguments as in `causal_sight`.

    A chunk in front of a tree is a part of it: a chain that all of the tree hangs on.

    Args:
      offsets: where each lane's nodes begin.
      page_table: pages of each lane.
      context_lengths: committed tokens per lane.
      positions: of the nodes in the text; only read if there is a window.
      parents: index of each node's parent within its lane, less than its own; -1 = none.
      max_queries: no lane has more nodes.
      window: also hides ancestors in flight that are window positions or more above.
    """
    num_queries, lanes = positions.shape[0], context_lengths.shape[0]
    query = jnp.arange(num_queries, dtype=jnp.int32)
    lane = jnp.sum(query[:, None] >= offsets[None, 1:-1], axis=1, dtype=jnp.int32)
    first = offsets[jnp.minimum(lane, lanes - 1)]
    own = query - first
    words = -(-max_queries // 32)
    word = jnp.arange(words, dtype=jnp.int32)
    bit = jnp.left_shift(jnp.int32(1), own % 32)
    visible = jnp.where(word[None, :] == (own // 32)[:, None], bit[:, None], 0)
    # A root is its own parent. Each step doubles how far up a node has looked.
    up = jnp.where(parents < 0, query, jnp.clip(first + parents, 0, num_queries - 1))
    for _ in range((max_queries - 1).bit_length()):
        visible = visible | visible[up]
        up = up[up]
    first_visible = first_in_window(positions, window)
    if window is not None:
        key = jnp.arange(32 * words, dtype=jnp.int32)
        key_positions = positions[jnp.clip(first[:, None] + key[None, :], 0, num_queries - 1)]
        inside = (key_positions >= first_visible[:, None]).reshape(num_queries, words, 32)
        visible &= jnp.sum(
            jnp.where(inside, jnp.left_shift(jnp.int32(1), key % 32).reshape(1, words, 32), 0), axis=2
        )
    return Sight(
        query_offsets=offsets,
        key_offsets=offsets,
        page_table=page_table,
        context_lengths=context_lengths,
        first_visible=first_visible,
        causal=jnp.zeros((lanes,), bool),
        visible=visible,
        max_queries=max_queries,
        max_keys=max_queries,
    )
