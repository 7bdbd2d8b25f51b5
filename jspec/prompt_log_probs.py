"""Log-probabilities of the tokens of a prompt, read off the hidden states of its chunks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.drafters.protocol import Text
from jspec.packing import owner
from jspec.round import Nodes
from jspec.slots import rows_of
from jspec.target_rows import LogProbs, token_log_probs
from jspec.targets.target import Target

BLOCK = 64  # nodes whose logits are held at a time


def prompt_log_probs(
    target: Target,
    params: object,
    hidden: Float[Array, "nodes hidden"],
    nodes: Nodes,
    text: Text,
    lanes: Int[Array, "lanes"],
    wanted: Bool[Array, ""],
    *,
    top: int,
) -> LogProbs:
    """What the target thought of the token behind each certain node, where that token is known.

    Args:
      target: static.
      params: the target's leaves.
      hidden: of all nodes.
      nodes: of a round with a chunk.
      text: of the slots.
      lanes: slot of each lane, -1 for padding.
      wanted: False skips the work, and every entry is 0.
      top: static; best tokens to return besides.

    Returns:
      Of lane l's i-th node in [l, i]; entries behind its certain nodes, or whose next token is not known, may
      hold anything.
    """
    num_nodes, num_lanes = hidden.shape[0], lanes.shape[0]
    width = num_nodes - num_lanes + 1
    every = jnp.arange(num_nodes, dtype=jnp.int32)
    rows = rows_of(lanes)[owner(every, nodes.offsets)]
    next_ids = text.tokens[rows, jnp.minimum(nodes.positions + 1, text.tokens.shape[1] - 1)]
    padding = -num_nodes % BLOCK
    blocks = tuple(jnp.pad(items, (0, padding)).reshape(-1, BLOCK) for items in (every, next_ids))

    def of_block(block: tuple[Array, Array]) -> LogProbs:
        nodes_here, ids_here = block
        logits = target.logits(params, hidden[nodes_here])
        index = jnp.arange(BLOCK, dtype=jnp.int32)[:, None]
        return token_log_probs(logits, index, ids_here[:, None], jnp.bool_(True), top=top)

    def computed() -> LogProbs:
        index = jax.lax.broadcasted_iota(jnp.int32, (num_lanes, width), 1)
        node = jnp.minimum(nodes.offsets[:-1, None] + index, num_nodes - 1)
        found = jax.lax.map(of_block, blocks)
        return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[3:])[node], found)

    def skipped() -> LogProbs:
        return LogProbs(
            chosen=jnp.zeros((num_lanes, width), jnp.float32),
            top_ids=jnp.zeros((num_lanes, width, top), jnp.int32),
            top=jnp.zeros((num_lanes, width, top), jnp.float32),
        )

    return jax.lax.cond(wanted, computed, skipped)
