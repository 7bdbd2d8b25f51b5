"""What an objective reads of the target: two frozen tables."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.head_columns import head_columns
from jspec.targets.target import Target
from pallas_kernels.pytree import pytree, static


@runtime_checkable
class Tables(Protocol):
    """Embedding and head of a target. No gradient flows into them."""

    def embed(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """What the target's first layer reads."""
        ...

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]:
        """Float32 scores."""
        ...


@pytree
class DraftTables:
    """The tables of a drafter with a reduced vocabulary: logits have the columns of its own ids."""

    tables: Tables
    head: Float[Array, "hidden draft_vocabulary"]
    columns: Int[Array, "vocabulary"]  # column of each target id; -1 = cannot be drafted

    def embed(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """The target's input embedding."""
        return self.tables.embed(ids)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows draft_vocabulary"]:
        """Float32 scores of the ids that can be drafted."""
        return jnp.dot(hidden, jax.lax.stop_gradient(self.head), preferred_element_type=jnp.float32)


def columns_of(tables: Tables, ids: Int[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Columns of target ids in the logits of these tables; -1 = cannot be drafted."""
    return tables.columns[ids] if isinstance(tables, DraftTables) else ids


def draft_tables(
    tables: Tables, hidden_size: int, ids: Int[Array, "draft_vocabulary"], vocab_size: int
) -> DraftTables:
    """The tables for drafting `ids` only.

    Args:
      tables: of the target; its logits have to be linear in the hidden state.
      hidden_size: of the target.
      ids: ascending target ids.
      vocab_size: of the target.

    Raises:
      ValueError: the target caps its logits.
    """
    columns = jnp.full((vocab_size,), -1, jnp.int32).at[ids].set(jnp.arange(ids.shape[0], dtype=jnp.int32))
    return DraftTables(tables=tables, head=head_columns(tables.logits, hidden_size, ids), columns=columns)


@pytree
class FrozenTarget:
    """The `Tables` of a loaded target."""

    params: tuple[Array, ...]
    target: Target = static()

    def embed(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch hidden"]:
        """The target's input embedding, scaled."""
        return self.target.embed(jax.lax.stop_gradient(self.params), ids)

    def logits(self, hidden: Float[Array, "rows hidden"]) -> Float[Array, "rows vocabulary"]:
        """The target's head, with its soft cap."""
        return self.target.logits(jax.lax.stop_gradient(self.params), hidden)
