"""The training loss of P-EAGLE: all depths in one pass, as mask rows beside the confirmed ones."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.drafters.eagle_net import EagleConfig, EagleNet, eagle_net
from jspec.net import Params
from jspec.objectives.batch import TrainBatch, split_features
from jspec.objectives.depth_samples import DepthSample, sample_depths
from jspec.objectives.frozen import Tables
from jspec.objectives.live_chunks import summed_over_live_places
from jspec.objectives.rollout_attention import blockwise
from jspec.objectives.rollouts import all_places, rollout_rows, taken, visible_context
from jspec.objectives.soft_labels import (
    Teacher,
    agreement,
    agreement_metrics,
    agreement_rows,
    check_tables,
    read_teacher,
    soft_labels,
)
from jspec.objectives.terms import Terms
from jspec.targets.layers import See


@dataclasses.dataclass(frozen=True, kw_only=True)
class PEagleObjective:
    """The loss of a P-EAGLE drafter over a random sample of rows at every depth.

    Cross-entropy with the target's distribution over the drafted ids, a mean over all rows whose best target id
    can be drafted.

    Source: SpecForge a6b6b023, algorithms/peagle. There, a batch is one document.
    """

    config: EagleConfig
    depths: int = 8  # tokens that are drafted at once
    ratio: float = 0.8  # see `jspec.objectives.depth_samples.sample_depths`
    least: float = 0.2
    chunk: int = 128  # rows whose logits are in memory at a time

    def __post_init__(self) -> None:
        if self.config.mask_token_id is None:
            raise ValueError(
                f"config: expected a P-EAGLE drafter with a mask token, got ({self.config.identity})"
            )
        if self.depths < 1 or self.chunk < 1:
            raise ValueError(f"depths, chunk: expected at least 1, got {self.depths} and {self.chunk}")
        for name in ("ratio", "least"):
            if not 0 < getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected above 0 and at most 1, got {getattr(self, name)}")

    @property
    def captured(self) -> tuple[str, ...]:
        """What a batch's features hold: the drafter's states, then what the target's head reads."""
        return (*self.config.features, "final_norm")

    def choose(self, batch: TrainBatch, key: Key[Array, ""]) -> DepthSample:
        """Random rows of a batch. The key is consumed."""
        rows, tokens = batch.ids.shape
        uniforms = jax.random.uniform(key, (rows, self.depths - 1, tokens))
        return sample_depths(batch, uniforms, ratio=self.ratio, least=self.least)

    def __call__(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        key: Key[Array, ""],
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss over rows drawn with `key`, which is consumed; see `terms`."""
        return self.terms(params, target, batch, self.choose(batch, key), step)

    def terms(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        sample: DepthSample,
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss over given rows.

        Args:
          params: leaves of the drafter, in the order of `jspec.drafters.eagle_net.eagle_leaves`.
          target: embedding and head; `DraftTables` for a reduced vocabulary.
          batch: tokens and features, as `captured` names them.
          sample: the rows of depth 1 and deeper.
          step: not used.

        Raises:
          ValueError: features of another width, or tables of another vocabulary.
        """
        check_tables(self.config.draft_vocab_size, target)
        net = eagle_net(self.config, params)
        features, last = split_features(batch, self.captured, self.config.target_hidden_size)
        states = parallel_states(net, target, batch, features, sample)
        places, depths, keep = _rows(batch, sample)
        row = rollout_rows(batch, places, depths)
        supervised = row.supervised & keep
        wanted = jnp.zeros(batch.ids.shape, jnp.bool_)
        wanted = wanted.at[jnp.arange(places.shape[0])[:, None], row.teachers].max(supervised)
        teacher = read_teacher(target, last, wanted)
        numerator, sums = summed_over_live_places(
            self._sums,
            (params, states),
            (target, row.teachers, depths, teacher),
            supervised,
            chunk=-(-self.chunk // batch.ids.shape[0]),
        )
        return self._combine(numerator, sums)

    def _sums(
        self,
        theta: tuple[Params, Array],
        constants: tuple[Tables, Array, Array, Teacher],
        places: Int[Array, "rows places"],
        supervised: Bool[Array, "rows places"],
    ) -> tuple[Array, dict[str, Array]]:
        (params, states), (target, teachers, depths, teacher) = theta, constants
        net = eagle_net(self.config, params)
        states, teachers, depths = (taken(values, places) for values in (states, teachers, depths))
        logits = net.logits(states.reshape(-1, states.shape[2]), target.logits)
        agreed = agreement(logits, soft_labels(target, teacher, teachers))
        at_depth = depths.reshape(-1)[None] == jnp.arange(self.depths)[:, None]

        def by_depth(values: Array) -> Array:
            return jnp.sum(jnp.where(at_depth, values[None].astype(jnp.float32), 0), axis=1)

        rows = agreement_rows(agreed, supervised.reshape(-1))
        sums = {name: by_depth(values) for name, values in rows.items()}
        return jnp.sum(sums["cross_entropy"]), sums

    def _combine(self, numerator: Array, sums: dict[str, Array]) -> Terms:
        return Terms(
            numerator=numerator,
            denominator=jax.lax.stop_gradient(jnp.sum(sums["known"])),
            metrics=jax.lax.stop_gradient(agreement_metrics(sums)),
        )


def parallel_states(
    net: EagleNet,
    target: Tables,
    batch: TrainBatch,
    features: Float[Array, "rows tokens width"],
    sample: DepthSample,
    ahead: int | Int[Array, ""] = 0,
) -> Float[Array, "rows places hidden"]:
    """States of every token at depth 0, then of the sampled rows, all in one pass.

    Args:
      net: the drafter.
      target: its input embedding, if the drafter has none of its own.
      batch: tokens and documents; its features are not read.
      features: those that the drafter reads.
      sample: rows of depth 1 and deeper.
      ahead: see `jspec.objectives.eagle_pass.first_pass`.
    """
    config = net.config
    assert config.mask_token_id is not None and net.mask_hidden is not None
    rows, tokens = batch.ids.shape
    samples = sample.anchors.shape[1]
    places, depths, _ = _rows(batch, sample)
    row = rollout_rows(batch, places, depths)
    ids = jnp.where(depths == 0, row.ids, config.mask_token_id)
    fused = net.fuse(features.reshape(rows * tokens, -1)).reshape(rows, tokens, -1)
    masked = net.fuse(net.mask_hidden[...][None])
    fused = jnp.concatenate([fused, jnp.broadcast_to(masked[None], (rows, samples, masked.shape[1]))], axis=1)
    decoder = config.decoder
    # Own rows of depth 1, 2, ...; at depth 0 there are none.
    all_own = jnp.pad(sample.own, ((0, 0), (tokens, 0), (0, 0)), constant_values=-1)
    own_depth = 1 + jax.lax.broadcasted_iota(jnp.int32, all_own.shape, 2)
    seen = {
        kind: (
            visible_context(batch, places, depths, window, ahead),
            all_own if window is None else jnp.where(own_depth > depths[:, :, None] - window, all_own, -1),
        )
        for kind, window in decoder.windows.items()
    }

    def see(index: int) -> See:
        visible, own = seen[decoder.layer_kinds[index]]

        def attended(q: Array, k: Array, v: Array) -> Array:
            q, k, v = (x.reshape(rows, tokens + samples, *x.shape[1:]) for x in (q, k, v))
            gathered = jnp.where(own >= 0, own + tokens, 0).reshape(rows, -1)
            k_own, v_own = (taken(x, gathered).reshape(*own.shape, *x.shape[2:]) for x in (k, v))
            out = blockwise(
                q,
                k[:, :tokens],
                v[:, :tokens],
                visible,
                k_own,
                v_own,
                own >= 0,
                scale=decoder.query_scale,
            )
            return out.reshape(-1, *out.shape[2:])

        return attended

    states, _, _ = net.step(
        net.embed(ids.reshape(-1), target.embed),
        fused.reshape(rows * (tokens + samples), -1),
        row.positions.reshape(-1),
        see,
    )
    return states.reshape(rows, tokens + samples, -1)


def _rows(batch: TrainBatch, sample: DepthSample) -> tuple[Array, Array, Array]:
    """Anchor, depth and whether it is there, of every token and then of the sampled rows."""
    places = all_places(batch)
    return (
        jnp.concatenate([places, sample.anchors], axis=1),
        jnp.concatenate([jnp.zeros_like(places), sample.depths], axis=1),
        jnp.concatenate([jnp.ones(places.shape, jnp.bool_), sample.keep], axis=1),
    )
