"""Who is above whom in a lane's tree of nodes, from the parents of its draft tokens.

Parents past a proposal's length may be anything; what is said of those nodes means nothing.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from pallas_kernels.first import first_where


def ancestors(parents: Int[Array, "lanes drafts"]) -> Bool[Array, "lanes nodes drafts"]:
    """Which draft tokens lie on the way from the anchor to each node, the node itself included.

    Row 0, the anchor's, is empty; the sum of a row is the node's depth. A chain of 2 gives
    [[0, 0], [1, 0], [1, 1]].
    """
    lanes, drafts = parents.shape
    nodes = drafts + 1
    path = jnp.broadcast_to(jnp.eye(nodes, drafts, k=-1, dtype=jnp.bool_), (lanes, nodes, drafts))
    up = _parents_of_nodes(parents)
    # Each step doubles how far up a node has looked.
    for _ in range(drafts.bit_length()):
        path = path | jnp.take_along_axis(path, up[:, :, None], axis=1)
        up = jnp.take_along_axis(up, up, axis=1)
    return path


def depths(parents: Int[Array, "lanes drafts"]) -> Int[Array, "lanes nodes"]:
    """How far below the anchor each node is; 0 for the anchor itself."""
    lanes, drafts = parents.shape
    up = _parents_of_nodes(parents)
    depth = jnp.concatenate([jnp.zeros((lanes, 1), jnp.int32), jnp.ones((lanes, drafts), jnp.int32)], axis=1)
    for _ in range(drafts.bit_length()):
        depth = depth + jnp.take_along_axis(depth, up, axis=1)
        up = jnp.take_along_axis(up, up, axis=1)
    return depth


def leading(parents: Int[Array, "lanes drafts"], depth: Int[Array, "lanes"]) -> Int[Array, "lanes"]:
    """How many draft tokens come before the first one that is deeper than `depth`."""
    return first_where(depths(parents)[:, 1:] > depth[:, None], parents.shape[1])


def _parents_of_nodes(parents: Int[Array, "lanes drafts"]) -> Int[Array, "lanes nodes"]:
    """With the anchor as its own parent."""
    lanes, drafts = parents.shape
    return jnp.concatenate([jnp.zeros((lanes, 1), jnp.int32), jnp.clip(parents, 0, drafts)], axis=1)
