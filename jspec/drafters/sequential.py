"""Heads that correct a block's logits by the tokens drafted before, and the walk from left to right.

A backbone gives every row of a block its base logits in one pass, blind to what the other rows draft. A
sequential head reads the token before a row and adds a correction of low rank: latent @ output. Training
with known tokens (`teacher_forced`) and drafting (`walk`) call the same `step`, so they cannot differ.

Rows are counted in draft tokens: row j is the one that draft token j comes from, the token before it is
draft token j - 1, the anchor for row 0.
"""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jspec.targets.layers import project_float32
from jspec.tempering import temper
from pallas_kernels.pytree import pytree
from pallas_kernels.vocabulary_row.choices import argmax

Embed = Callable[[Array], Array]  # ids to what the backbone reads of them
# The column taken of each block, -1 for none, and the distribution that it was taken from.
Choose = Callable[
    [Int[Array, ""], Float[Array, "blocks columns"]],
    tuple[Int[Array, "blocks"], Float[Array, "blocks columns"]],
]


@runtime_checkable
class SequentialHead(Protocol):
    """What corrects the logits of a row, given the token before it and a state of its own."""

    output: nnx.Param[Any]  # [rank, columns]

    def read(self, tokens: Int[Array, "*rows"], embed: Embed) -> Float[Array, "*rows width"]:
        """What it sees of the tokens before the rows."""
        ...

    def project(self, hidden: Float[Array, "*rows hidden"]) -> Float[Array, "*rows inner"]:
        """The hidden states' side of `step`, of all rows at once; it may be of width 0."""
        ...

    def start(self, blocks: int) -> Float[Array, "blocks size"]:
        """The state before row 0; it may be of size 0."""
        ...

    def step(
        self,
        state: Float[Array, "blocks size"],
        projected: Float[Array, "blocks inner"],
        read: Float[Array, "blocks width"],
        row: Int[Array, ""],
    ) -> tuple[Float[Array, "blocks size"], Float[Array, "blocks rank"]]:
        """The next state, and the row's latent; a latent of zeros corrects nothing."""
        ...


@pytree
class Walk:
    """One line of draft tokens per block."""

    tokens: Int[Array, "blocks drafts"]  # -1 where a row is no distribution, and after it
    probs: Float[Array, "blocks drafts columns"]  # what each token was taken from; 0 where it is -1


def teacher_forced(
    head: SequentialHead,
    hidden: Float[Array, "blocks drafts hidden"],
    read: Float[Array, "blocks drafts width"],
) -> Float[Array, "blocks drafts rank"]:
    """The latents of all rows, given the token before each.

    Args:
      head: of the drafter.
      hidden: states of the rows.
      read: `head.read` of the tokens before them.
    """
    blocks, drafts, _ = hidden.shape

    def step(state: Array, item: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        return head.step(state, item[1], item[2], item[0])

    rows = (
        jnp.arange(drafts, dtype=jnp.int32),
        head.project(hidden).swapaxes(0, 1),
        read.swapaxes(0, 1),
    )
    return jax.lax.scan(step, head.start(blocks), rows)[1].swapaxes(0, 1)


def correction(
    latent: Float[Array, "*rows rank"],
    output: Float[Array, "rank all"],
    columns: Int[Array, "blocks some"] | None = None,
) -> Float[Array, "*rows columns"]:
    """What is added to the logits: latent @ output, summed in float32.

    Args:
      latent: of the rows.
      output: of the head.
      columns: the columns that are wanted, for one row per block; None = all.
    """
    if columns is not None:
        taken = jnp.take(output, columns, axis=1, mode="fill")
        held = latent.astype(output.dtype)
        return jnp.einsum("br,rbc->bc", held, taken, preferred_element_type=jnp.float32)
    flat = latent.reshape(-1, latent.shape[-1]).astype(output.dtype)
    return project_float32(flat, output).reshape(*latent.shape[:-1], -1)


def walk(
    head: SequentialHead | None,
    embed: Embed,
    anchors: Int[Array, "blocks"],
    drafting: Bool[Array, "blocks"],
    hidden: Float[Array, "blocks drafts hidden"],
    logits: Float[Array, "blocks drafts columns"],
    choose: Choose,
    *,
    ids: Int[Array, "blocks columns"] | Int[Array, "columns"] | None = None,
    pool: Int[Array, "blocks columns"] | None = None,
) -> Walk:
    """Takes one column of each row, left to right, after correcting its logits.

    What a token was taken from replaces its row of logits, so that there is one array of that size.

    Args:
      head: of the drafter; None = the logits as they are.
      embed: for heads that read embeddings.
      anchors: tokens before row 0.
      drafting: False: no token and no distribution is wanted of this block.
      hidden: states of the rows.
      logits: base logits of the rows.
      choose: given a row (traced) and its corrected logits.
      ids: target id of each column; None = the columns are ids.
      pool: which of the head's columns these are, per block; None = all of them.
    """

    def target_ids(columns: Int[Array, "blocks"]) -> Int[Array, "blocks"]:
        if ids is None:
            return columns
        if ids.ndim == 1:
            return ids[columns]
        return jnp.take_along_axis(ids, columns[:, None], axis=1)[:, 0]

    def step(carry: tuple[Array, ...], item: tuple[Array, Array]) -> tuple[tuple[Array, ...], Array]:
        (token, state, sound, rows), (row, projected) = carry, item
        scores = jax.lax.dynamic_index_in_dim(rows, row, axis=1, keepdims=False)
        if head is not None:
            state, latent = head.step(state, projected, head.read(token, embed), row)
            scores = scores + correction(latent, head.output[...], pool)
        column, probs = choose(row, scores)
        sound = sound & (column >= 0)
        rows = jax.lax.dynamic_update_index_in_dim(rows, jnp.where(sound[:, None], probs, 0), row, axis=1)
        token = target_ids(jnp.maximum(column, 0))
        return (token, state, sound, rows), jnp.where(sound, token, -1)

    blocks, drafts, _ = hidden.shape
    projected = hidden[:, :, :0] if head is None else head.project(hidden)
    start = jnp.zeros((blocks, 0)) if head is None else head.start(blocks)
    carry = (anchors, start, drafting, logits)
    items = (jnp.arange(drafts, dtype=jnp.int32), projected.swapaxes(0, 1))
    (_, _, _, probs), tokens = jax.lax.scan(step, carry, items)
    return Walk(tokens=tokens.T, probs=probs)


def best_choice(
    scores: Float[Array, "blocks columns"],
) -> tuple[Int[Array, "blocks"], Float[Array, "blocks columns"]]:
    """The best column, the first on ties, and all mass on it."""
    column = argmax(scores)
    return column, all_mass(column, scores.shape[1])


def all_mass(column: Int[Array, "blocks"], columns: int) -> Float[Array, "blocks columns"]:
    """The distribution of a choice that is none: 1 at the column."""
    return jax.nn.one_hot(column, columns, dtype=jnp.float32)


def noisy_choice(
    scores: Float[Array, "blocks columns"],
    temperature: Float[Array, "blocks"],
    noise: Float[Array, "blocks columns"],
) -> Int[Array, "blocks"]:
    """argmax(scores / temperature + noise): with Gumbel noise, a draw from softmax(scores / temperature).

    Args:
      scores: of the columns; a row with NaN gives -1.
      temperature: above 0.
      noise: see `jspec.coins.gumbel`.
    """
    return argmax(below_best(scores, temperature) + noise)


def drawn_choice(
    scores: Float[Array, "blocks columns"],
    temperature: Float[Array, "blocks"],
    coins: Float[Array, "blocks"],
) -> tuple[Int[Array, "blocks"], Float[Array, "blocks columns"]]:
    """A draw from softmax(scores / temperature) by inverse CDF, and that distribution.

    Args:
      scores: of the columns; a row with NaN gives -1.
      temperature: above 0.
      coins: uniform in [0, 1).
    """
    ones = jnp.ones_like(temperature)
    made = temper(scores, temperature, jnp.zeros(ones.shape, jnp.int32), ones, 0 * ones, coins)
    assert made.drawn is not None
    return made.drawn, jnp.exp(made.logits - made.log_normaliser[:, None])


def below_best(
    scores: Float[Array, "blocks columns"], temperature: Float[Array, "blocks"]
) -> Float[Array, "blocks columns"]:
    """(scores - the best) / temperature: a small temperature then overflows to -inf, never to inf."""
    return (scores - jnp.max(scores, axis=1, keepdims=True)) / temperature[:, None]
