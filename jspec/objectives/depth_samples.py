"""Which tokens P-EAGLE is trained on at which depth: fewer at every depth, each with all depths before it.

A row is (anchor t, depth d). At depth 0 it is every token, with the confirmed features and the next token of
the table in `jspec.objectives.rollouts`; at depth d it reads the mask token and the learned mask state in
their place, stands at position positions[t] + d, and learns what row t of depth d learns there.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jspec.objectives.batch import TrainBatch
from jspec.objectives.rollouts import all_places, rollout_rows, taken
from pallas_kernels.pytree import pytree


@pytree
class DepthSample:
    """Rows of depth 1 and deeper. Depth 0 is every token."""

    anchors: Int[Array, "rows samples"]
    depths: Int[Array, "rows samples"]  # 1, 2, ...; 0 where nothing is kept
    own: Int[Array, "rows samples earlier"]  # index of the anchor's row of depth 1, 2, ...; -1 = not seen

    @property
    def keep(self) -> Bool[Array, "rows samples"]:
        """False: a place that no row was found for."""
        return self.depths > 0


def sample_sizes(tokens: int, *, depths: int, ratio: float, least: float) -> tuple[int, ...]:
    """Places for rows of depth 1, 2, ...: as many as `tokens` supervised ones would need."""
    return tuple(int(max(0, tokens - d) * max(ratio**d, least)) for d in range(1, depths))


def sample_depths(
    batch: TrainBatch, uniforms: Float[Array, "rows depths tokens"], *, ratio: float, least: float
) -> DepthSample:
    """Chooses the rows: those with the smallest random numbers.

    Of n supervised tokens, depth d keeps int(max(0, n - d) * max(ratio**d, least)), or as many as are
    there: at depth 1 an anchor whose next token is supervised, deeper one that was kept at the depth before and
    whose token t + d is supervised and of its document.

    Args:
      batch: the documents.
      uniforms: in [0, 1), for depths 1, 2, ...
      ratio: of rows that stay from depth to depth.
      least: of all supervised tokens, at any depth.

    Raises:
      ValueError: ratios that are none.

    Source: P-EAGLE's conditional drop; SpecForge a6b6b023, algorithms/peagle.
    """
    for name, value in (("ratio", ratio), ("least", least)):
        if not 0 < value <= 1:
            raise ValueError(f"{name}: expected above 0 and at most 1, got {value}")
    rows, extra, tokens = uniforms.shape
    places = all_places(batch)
    supervised = jnp.sum(rollout_rows(batch, places, 0).supervised, axis=1)
    sizes = sample_sizes(tokens, depths=extra + 1, ratio=ratio, least=least)
    eligible = jnp.ones((rows, tokens), jnp.bool_)
    anchors, depths = [], []
    for depth, size in enumerate(sizes, start=1):
        eligible = eligible & rollout_rows(batch, places, depth).supervised
        share = max(ratio**depth, least)
        # In float64 on the host for every count: float32 would round some products to the next integer.
        wanted = jnp.asarray([int(max(0, n - depth) * share) for n in range(tokens + 1)])[supervised]
        rank = jnp.argsort(jnp.argsort(jnp.where(eligible, uniforms[:, depth - 1], 2.0), axis=1), axis=1)
        eligible = eligible & (rank < wanted[:, None])
        index = jnp.sort(jnp.where(eligible, places, tokens), axis=1)[:, :size]
        kept = index < tokens
        anchors.append(jnp.where(kept, index, 0))
        depths.append(jnp.where(kept, depth, 0))
    none = jnp.zeros((rows, 0), jnp.int32)
    return depth_sample(
        jnp.concatenate([none, *anchors], axis=1), jnp.concatenate([none, *depths], axis=1), tokens, extra
    )


def depth_sample(
    anchors: Int[Array, "rows samples"], depths: Int[Array, "rows samples"], tokens: int, deepest: int
) -> DepthSample:
    """The sample of given rows, in any order; depth 0 marks a place without one."""
    rows, samples = anchors.shape
    index = jnp.broadcast_to(jnp.arange(samples, dtype=jnp.int32), anchors.shape)
    row = jnp.arange(rows)[:, None]
    table = jnp.full((rows, tokens, deepest + 1), -1, jnp.int32).at[row, anchors, depths].set(index)
    found = taken(table, anchors)[:, :, 1:]
    seen = jnp.arange(1, deepest + 1)[None, None] <= depths[:, :, None]
    return DepthSample(
        anchors=anchors.astype(jnp.int32),
        depths=depths.astype(jnp.int32),
        own=jnp.where(seen, found, -1),
    )
