"""The training loss of EAGLE: the next feature as a regression, and what the target's head makes of it."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.drafters.eagle_net import EagleConfig, eagle_net
from jspec.net import Params
from jspec.objectives.batch import TrainBatch, check_features
from jspec.objectives.eagle_pass import first_pass
from jspec.objectives.frozen import Tables
from jspec.objectives.live_chunks import summed_over_live_places
from jspec.objectives.rollouts import all_places, rollout_rows, taken
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

Noise = Literal["none", "uniform", "gaussian"]
_DOCUMENT = 512  # tokens of the document at which uniform noise has its nominal width


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleObjective:
    """The loss of an EAGLE drafter: row t is depth 0 of the table in `jspec.objectives.rollouts`.

    feature_weight * smooth L1 between the row's state and the feature of token t + 1 (mean over its width),
    plus token_weight * cross-entropy between what the target's head makes of the two; both are means over
    supervised rows. Input features get noise, as drafts are made from states that are not exact:
    "uniform" from -width / 2 to width / 2 times 512 / tokens of the document, "gaussian" of that deviation.

    Source: EAGLE (arXiv 2401.15077); SafeAILab/EAGLE, train/main.py. There, the supervised count has 1e-5 added.
    """

    config: EagleConfig
    feature_weight: float = 1.0
    token_weight: float = 0.1
    noise: Noise = "none"
    noise_width: float = 0.2
    chunk: int = 128  # rows whose logits are in memory at a time

    def __post_init__(self) -> None:
        if self.config.kind != "eagle":
            raise ValueError(f"config: expected an EAGLE drafter, got ({self.config.identity})")
        if self.noise not in get_args(Noise):
            raise ValueError(f"noise: expected one of {', '.join(get_args(Noise))}, got {self.noise!r}")
        for name in ("feature_weight", "token_weight", "noise_width"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if self.chunk < 1:
            raise ValueError(f"chunk: expected at least 1, got {self.chunk}")

    @property
    def captured(self) -> tuple[str, ...]:
        """What a batch's features hold."""
        return self.config.features

    def choose(self, batch: TrainBatch, key: Key[Array, ""]) -> Float[Array, "rows tokens width"]:
        """The noise on a batch's features; of width 0 without noise. The key is consumed."""
        shape = batch.features.shape
        if self.noise == "none":
            return jnp.zeros((*shape[:2], 0), jnp.float32)
        if self.noise == "gaussian":
            return self.noise_width * jax.random.normal(key, shape, jnp.float32)
        same = batch.segments[:, :, None] == batch.segments[:, None, :]
        length = jnp.sum(same, axis=2, dtype=jnp.float32)[:, :, None]
        return (jax.random.uniform(key, shape) - 0.5) * (self.noise_width * _DOCUMENT / length)

    def __call__(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        key: Key[Array, ""],
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss with noise drawn with `key`, which is consumed; see `terms`."""
        return self.terms(params, target, batch, self.choose(batch, key), step)

    def terms(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        noise: Float[Array, "rows tokens width"],
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss of a batch with given noise.

        Args:
          params: leaves of the drafter, in the order of `jspec.drafters.eagle_net.eagle_leaves`.
          target: embedding and head; `DraftTables` for a reduced vocabulary.
          batch: tokens and features.
          noise: added to the features that are read; those that are learned have none.
          step: not used.

        Raises:
          ValueError: features of another width, or tables of another vocabulary.
        """
        config = self.config
        check_tables(config.draft_vocab_size, target)
        check_features(batch, config.features, config.target_hidden_size)
        net = eagle_net(config, params)
        read = batch.features if not noise.shape[2] else batch.features + noise.astype(batch.features.dtype)
        states = first_pass(net, target.embed, batch, read).states
        row = rollout_rows(batch, all_places(batch), 0)
        teacher = read_teacher(target, batch.features, jnp.roll(row.supervised, 1, axis=1))
        numerator, sums = summed_over_live_places(
            self._sums,
            (params, states),
            (target, row.teachers, teacher),
            row.supervised,
            chunk=-(-self.chunk // batch.ids.shape[0]),
        )
        return self._combine(numerator, sums)

    def _sums(
        self,
        theta: tuple[Params, Array],
        constants: tuple[Tables, Array, Teacher],
        places: Int[Array, "rows places"],
        supervised: Bool[Array, "rows places"],
    ) -> tuple[Array, dict[str, Array]]:
        (params, states), (target, teachers, teacher) = theta, constants
        net = eagle_net(self.config, params)
        states, teachers = taken(states, places), taken(teachers, places)
        wanted = taken(teacher.states, teachers)
        distance = jnp.abs(states.astype(jnp.float32) - wanted.astype(jnp.float32))
        smooth = jnp.where(distance < 1, 0.5 * distance * distance, distance - 0.5)
        logits = net.logits(states.reshape(-1, states.shape[2]), target.logits)
        agreed = agreement(logits, soft_labels(target, teacher, teachers))
        rows = agreement_rows(agreed, supervised.reshape(-1))
        sums = {name: jnp.sum(values, dtype=jnp.float32) for name, values in rows.items()}
        sums["feature"] = jnp.sum(jnp.where(supervised, jnp.mean(smooth, axis=2), 0))
        return self.feature_weight * sums["feature"] + self.token_weight * sums["cross_entropy"], sums

    def _combine(self, numerator: Array, sums: dict[str, Array]) -> Terms:
        metrics = agreement_metrics(sums) | {"feature_loss": (sums["feature"], sums["supervised"])}
        return Terms(
            numerator=numerator,
            denominator=jax.lax.stop_gradient(sums["supervised"]),
            metrics=jax.lax.stop_gradient(metrics),
        )
