"""Candidates of DFlash 2, their scores given the token before, and the walk through them.

Every masked row of a block has K candidates. A path takes one of each row, left to right: the scores
of a row depend on the token that was taken in the row before, the anchor in the first.
Nothing looks ahead (no Viterbi), so a shorter draft is a prefix of a longer one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.vocabulary import draw, largest
from pallas_kernels.pytree import pytree
from pallas_kernels.vocabulary_row.choices import argmax

# Scores [blocks, candidates] of draft row j (static), given the tokens before.
Score = Callable[[int, Int[Array, "blocks"]], Float[Array, "blocks candidates"]]
# The candidate taken of each block, -1 for none, and the distribution that it was taken from.
Choose = Callable[
    [int, Float[Array, "blocks candidates"]],
    tuple[Int[Array, "blocks"], Float[Array, "blocks candidates"]],
]


@pytree
class Candidates:
    """The best ids of each row, best first; of equal ones the lowest id first."""

    ids: Int[Array, "*rows candidates"]
    unary: Float[Array, "*rows candidates"]  # their logits


@pytree
class Walk:
    """One path through the candidates of each block."""

    tokens: Int[Array, "blocks drafts"]  # -1 where a row's scores are no distribution, and after it
    probs: Float[Array, "blocks drafts candidates"]  # what each token was taken from; 0 where it is -1


def top_candidates(logits: Float[Array, "*rows vocabulary"], top_k: int) -> Candidates:
    """The `top_k` greatest of each row, strictly: neither ties nor anything else makes it more.

    Args:
      logits: transformed by `jspec.drafters.dflash_net.draft_logits`, float32. Rows with NaN give NaN.
      top_k: static.
    """
    unary, ids = largest(logits.reshape(-1, logits.shape[-1]), top_k, here=_top)
    shape = (*logits.shape[:-1], top_k)
    broken = jnp.any(jnp.isnan(logits), axis=-1, keepdims=True)
    return Candidates(ids=ids.reshape(shape), unary=jnp.where(broken, jnp.nan, unary.reshape(shape)))


def _top(
    logits: Float[Array, "rows vocabulary"], top_k: int, width: int = 128
) -> tuple[Float[Array, "rows candidates"], Int[Array, "rows candidates"]]:
    """As `jax.lax.top_k`, five times as fast over a vocabulary: only the best blocks are looked into.

    An id outside of the `top_k` blocks with the greatest maxima (the first on ties) comes after one of
    each of these, so it is not among the best ids either.
    """
    rows, vocabulary = logits.shape
    blocks = -(-vocabulary // width)
    if blocks <= top_k:
        best, ids = jax.lax.top_k(logits, top_k)
        return best, ids
    filled = jnp.pad(logits, ((0, 0), (0, blocks * width - vocabulary)), constant_values=-jnp.inf)
    filled = filled.reshape(rows, blocks, width)
    chosen = jnp.sort(jax.lax.top_k(jnp.max(filled, axis=2), top_k)[1], axis=1)
    inside = jnp.take_along_axis(filled, chosen[:, :, None], axis=1).reshape(rows, -1)
    best, index = jax.lax.top_k(inside, top_k)
    return best, jnp.take_along_axis(chosen, index // width, axis=1) * width + index % width


def candidate_scores(
    projected: Float[Array, "*rows rank"],
    before: Float[Array, "*rows rank"],
    after: Float[Array, "*rows candidates rank"],
    unary: Float[Array, "*rows candidates"],
) -> Float[Array, "*rows candidates"]:
    """S(p, c) = unary(c) + <A[p] * proj(h), B[c]>, in float32.

    Args:
      projected: proj(h), hidden states of the rows.
      before: A[p], predecessor codebook at the tokens before.
      after: B[c], successor codebook at the candidates.
      unary: logits of the candidates.
    """
    query = projected.astype(jnp.float32) * before.astype(jnp.float32)
    product = jnp.sum(query[..., None, :] * after.astype(jnp.float32), axis=-1)
    return unary.astype(jnp.float32) + product


def lattice(
    scores: Callable[[Int[Array, "blocks drafts"]], Float[Array, "blocks drafts candidates"]],
    anchors: Int[Array, "blocks"],
    candidates: Candidates,
) -> Float[Array, "blocks drafts predecessors candidates"]:
    """Scores of every candidate after every candidate of the row before; in row 0, after the anchor.

    Args:
      scores: given the token before each draft row.
      anchors: of the blocks; row 0 holds the same scores for each of its predecessors.
      candidates: of the draft rows.
    """
    top_k = candidates.ids.shape[2]
    first = jnp.broadcast_to(anchors[:, None, None], (anchors.shape[0], 1, top_k))
    before = jnp.concatenate([first, candidates.ids[:, :-1]], axis=1)
    return jnp.stack([scores(before[:, :, index]) for index in range(top_k)], axis=2)


def walk(
    anchors: Int[Array, "blocks"],
    ids: Int[Array, "blocks drafts candidates"],
    score: Score,
    choose: Choose,
) -> Walk:
    """Takes one candidate of each row, left to right.

    Args:
      anchors: tokens before row 0.
      ids: candidates of the rows.
      score: of the candidates of a row, given the tokens taken before it.
      choose: given a row (static) and its scores, e.g. `greedy_choice` of the scores.
    """
    token, sound = anchors, jnp.ones(anchors.shape, jnp.bool_)
    tokens, probs = [], []
    for row in range(ids.shape[1]):
        index, row_probs = choose(row, score(row, jnp.maximum(token, 0)))
        sound = sound & (index >= 0)
        taken = jnp.take_along_axis(ids[:, row], jnp.maximum(index, 0)[:, None], axis=1)[:, 0]
        token = jnp.where(sound, taken, -1)
        tokens.append(token)
        probs.append(jnp.where(sound[:, None], row_probs, 0))
    return Walk(tokens=jnp.stack(tokens, axis=1), probs=jnp.stack(probs, axis=1))


def greedy_choice(
    scores: Float[Array, "blocks candidates"],
) -> tuple[Int[Array, "blocks"], Float[Array, "blocks candidates"]]:
    """The best candidate, the first on ties, and all mass on it."""
    index = argmax(scores)
    return index, jax.nn.one_hot(index, scores.shape[1], dtype=jnp.float32)


def sampled_choice(
    scores: Float[Array, "blocks candidates"],
    temperature: Float[Array, "blocks"],
    coins: Float[Array, "blocks"],
) -> tuple[Int[Array, "blocks"], Float[Array, "blocks candidates"]]:
    """A draw from softmax(scores / temperature) over the candidates, by inverse CDF.

    Args:
      scores: of the candidates, in their order; a row with NaN gives -1.
      temperature: above 0.
      coins: uniform in [0, 1): the first candidate whose cumulative probability exceeds it is taken.
    """
    best = jnp.max(scores, axis=1, keepdims=True)
    weights = jnp.exp((scores - best) / temperature[:, None])
    probs = weights / jnp.sum(weights, axis=1, keepdims=True)
    return draw(probs, coins), probs
