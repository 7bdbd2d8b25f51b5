"""Which rows an EAGLE drafter is trained on, and what each reads and learns.

Row t at depth d, where t is an index into the token row (EAGLE has depth 0 only):

| depth | state it is fed             | token     | position        | learns the target's      | weight                    |
|-------|-----------------------------|-----------|-----------------|--------------------------|---------------------------|
| 0     | features of token t         | t + 1     | positions[t]    | distribution after t + 1 | loss_mask[t], see below   |
| d     | the row's own at depth d - 1 | t + 1 + d | positions[t] + d | distribution after t+1+d | loss_mask[t + d]          |

A row has weight only if token t + 1 + d is there and of the same document: so the last token of a document
is never waited for. Tokens are those of the text at every depth (teacher-forced), also where the
drafter would have proposed others. A row sees the depth-0 rows of its own document up to t, and itself
at depths 1 to d: what decoding d steps from token t sees. A window layer sees of these the last
`window` positions, the row's own counted.

Source: SpecForge a6b6b023, `OnlineEagle3Model` and `TargetHead.preprocess`; EAGLE, train/main.py.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jspec.objectives.batch import TrainBatch
from pallas_kernels.pytree import pytree


@pytree
class RolloutRows:
    """What rows t of one depth read and learn; see the table above."""

    ids: Int[Array, "rows places"]  # token that is read; 0 where the document has ended
    positions: Int[Array, "rows places"]
    teachers: Int[Array, "rows places"]  # index of the token whose target distribution is learned
    supervised: Bool[Array, "rows places"]


def rollout_rows(
    batch: TrainBatch, places: Int[Array, "rows places"], depth: int | Int[Array, "rows places"]
) -> RolloutRows:
    """The table for rows `places` of each token row.

    Args:
      batch: the documents.
      places: t, in any order.
      depth: d, one for all or each its own.
    """
    tokens = batch.ids.shape[1]
    read = places + 1 + depth
    inside = read < tokens
    read = jnp.minimum(read, tokens - 1)
    document = taken(batch.segments, places)
    inside = inside & (document > 0) & (taken(batch.segments, read) == document)
    masked = taken(batch.loss_mask, jnp.minimum(places + depth, tokens - 1))
    return RolloutRows(
        ids=jnp.where(inside, taken(batch.ids, read), 0),
        positions=taken(batch.positions, places) + depth,
        teachers=read,
        supervised=inside & masked,
    )


def all_places(batch: TrainBatch) -> Int[Array, "rows tokens"]:
    """Every token of every row."""
    return jax.lax.broadcasted_iota(jnp.int32, batch.ids.shape, 1)


def visible_context(
    batch: TrainBatch,
    places: Int[Array, "rows places"],
    depth: int | Int[Array, "rows places"] = 0,
    window: int | None = None,
    ahead: int | Int[Array, ""] = 0,
) -> Bool[Array, "rows places tokens"]:
    """Which depth-0 rows a row sees: those up to its own, of its document. Padding sees padding.

    Args:
      batch: the documents.
      places: t, in any order.
      depth: d, one for all or each its own; only read if there is a window.
      window: positions that the row sees, its own counted; None = all.
      ahead: rows behind its own that it is shown as well, as decoding never does.
    """
    same = taken(batch.segments, places)[:, :, None] == batch.segments[:, None, :]
    index = all_places(batch)[:, None, :]
    visible = same & (index <= (places + ahead)[:, :, None])
    return visible if window is None else visible & (index > (places + (depth - window))[:, :, None])


def taken(values: Array, index: Int[Array, "rows places"]) -> Array:
    """values[r, index[r, i]] for values of [rows, tokens, ...]."""
    index = index.reshape(*index.shape, *(1,) * (values.ndim - 2))
    return jnp.take_along_axis(values, index, axis=1)
