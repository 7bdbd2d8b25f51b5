"""Coupled verification: the target's draw at a position is fixed by the request's seed.

token = argmax(log p + g(seed, position, id)), and a draft token is accepted iff it equals that. The
output is a function of (seed, text before) alone: the same under any drafter, budget, batch and slot,
and the same as decoding without speculation. No q is needed; a drafter that adds the same noise to its
own log-probabilities is accepted most often.

Source: Daliri et al., arXiv 2408.07978.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int, UInt32

from jspec.coins import coupled_noise
from jspec.target_rows import TargetRows, lanes_of
from jspec.verify.greedy import node_numbers
from pallas_kernels.vocabulary_row.choices import argmax


def coupled_choices(
    rows: TargetRows, seeds: UInt32[Array, "lanes"], text_lengths: Int[Array, "lanes"], nodes: int
) -> Int[Array, "lanes nodes"]:
    """The token that each lane's seed draws after each of its first `nodes` nodes, in a chain.

    Args:
      rows: sampled rows; the choices of others mean nothing.
      seeds: of the lanes' requests.
      text_lengths: tokens known per lane, the anchor included: node 0 decides the token at this position.
      nodes: static; columns of the result.

    Returns:
      ids; -1 where the row is not a distribution.
    """
    num_rows, vocabulary = rows.logits.shape
    lane = lanes_of(rows.starts, num_rows)
    node = jnp.arange(num_rows, dtype=jnp.int32) - rows.starts[lane]
    noise = coupled_noise(seeds[lane], text_lengths[lane] + node, vocabulary)
    # The normaliser would shift a whole row. Without it nothing here depends on the batch's shape.
    kept = jnp.where(rows.logits < rows.floor[:, None], -jnp.inf, rows.logits)
    chosen = argmax(kept + noise)
    index = rows.starts[:, None] + node_numbers(rows.starts.shape[0], nodes)
    return chosen[jnp.clip(index, 0, num_rows - 1)]
