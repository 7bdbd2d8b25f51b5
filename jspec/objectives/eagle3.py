"""The training loss of EAGLE-3: test-time training of any depth."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.drafters.eagle_net import EagleConfig, eagle_net
from jspec.net import Params
from jspec.objectives.batch import TrainBatch, split_features
from jspec.objectives.eagle_pass import FirstPass, first_pass, rollouts
from jspec.objectives.frozen import Tables
from jspec.objectives.live_chunks import summed_over_live_places
from jspec.objectives.rollouts import all_places, rollout_rows
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
from pallas_kernels.pytree import pytree

DepthLoss = Literal["cross_entropy", "lk_alpha", "lk_lambda"]
Normaliser = Literal["tokens", "specforge"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Eagle3Objective:
    """The loss of an EAGLE-3 drafter; see `jspec.objectives.rollouts` for what each row learns.

    Every supervised token is rolled out for `depths` steps. Per depth d the loss is the cross-entropy with
    the target's distribution over the drafted ids, or one of the LK losses, weighted by decay**d. A row
    whose best target id cannot be drafted has no weight, but counts in `accuracy`.

    "tokens" divides by the sum of the weights: the exact weighted mean over rows and depths, also over
    micro-batches. "specforge" repeats that library: cross-entropy is divided by rows times tokens, padding
    and prompts included; acceptance by the supervised rows of its depth in the micro-batch.

    Source: SpecForge a6b6b023, `OnlineEagle3Model`, core/lk_loss.py; EAGLE-3 (arXiv 2503.01840).
    """

    config: EagleConfig
    depths: int = 7  # steps that a row is rolled out, the one from confirmed features counted
    decay: float = 0.8
    loss: DepthLoss = "cross_entropy"
    kl_scale: float = 1.0  # of "lk_lambda"
    kl_decay: float = 1.0
    normaliser: Normaliser = "tokens"
    chunk: int = 32  # places of every token row whose rollouts and logits are in memory at a time
    data_axis: str | None = None  # mesh axis that splits the rows, where called under shard_map; LK needs it

    def __post_init__(self) -> None:
        if self.config.kind != "eagle3" or self.config.mask_token_id is not None:
            raise ValueError(f"config: expected an EAGLE-3 drafter, got ({self.config.identity})")
        if self.loss not in get_args(DepthLoss):
            raise ValueError(f"loss: expected one of {', '.join(get_args(DepthLoss))}, got {self.loss!r}")
        if self.normaliser not in get_args(Normaliser):
            raise ValueError(
                f"normaliser: expected one of {', '.join(get_args(Normaliser))}, got {self.normaliser!r}"
            )
        for name in ("depths", "chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        if not 0 < self.decay <= 1:
            raise ValueError(f"decay: expected above 0 and at most 1 (all depths alike), got {self.decay}")

    @property
    def captured(self) -> tuple[str, ...]:
        """What a batch's features hold: the drafter's states, then what the target's head reads."""
        return (*self.config.features, "final_norm")

    def choose(self, batch: TrainBatch, key: Key[Array, ""]) -> Float[Array, "rows 0"]:
        """Nothing in this loss is random."""
        return jnp.zeros((batch.ids.shape[0], 0), jnp.float32)

    def __call__(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        key: Key[Array, ""],
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """As `terms`; `key` and `step` are not used."""
        return self.terms(params, target, batch)

    def terms(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        chosen: Array | None = None,
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss of a batch.

        Args:
          params: leaves of the drafter, in the order of `jspec.drafters.eagle_net.eagle_leaves`.
          target: embedding and head; `DraftTables` for a reduced vocabulary.
          batch: tokens and features, as `captured` names them.
          chosen: not used, as `step`.
          step: update that this batch belongs to.
        """
        check_tables(self.config.draft_vocab_size, target)
        features, last = split_features(batch, self.captured, self.config.target_hidden_size)
        first = first_pass(eagle_net(self.config, params), target.embed, batch, features)
        places = all_places(batch)
        live = jnp.zeros(places.shape, jnp.bool_)
        wanted = jnp.zeros(places.shape, jnp.bool_)
        for depth in range(self.depths):
            supervised = rollout_rows(batch, places, depth).supervised
            live, wanted = live | supervised, wanted | _shifted(supervised, depth + 1)
        teacher = read_teacher(target, last, wanted)

        def summed(params: Params, first: FirstPass, shares: _Shares) -> tuple[Array, dict[str, Array]]:
            constants = target, batch, teacher, shares
            return summed_over_live_places(self._sums, (params, first), constants, live, chunk=self.chunk)

        shares = self._shares(batch, None)
        if shares is None:  # what a row counts depends on all of them: they are looked at before
            none = jnp.zeros((self.depths,), jnp.float32)
            nothing = _Shares(cross_entropy=none, log_acceptance=none, missed=none)
            seen = summed(*jax.lax.stop_gradient((params, first)), nothing)[1]
            shares = self._shares(batch, seen)
            assert shares is not None
        numerator, sums = summed(params, first, shares)
        return self._combine(numerator, sums, batch)

    def _sums(
        self,
        theta: tuple[Params, FirstPass],
        constants: tuple[Tables, TrainBatch, Teacher, "_Shares"],
        places: Int[Array, "rows places"],
        live: Bool[Array, "rows places"],
    ) -> tuple[Array, dict[str, Array]]:
        """The numerator of some rows, and everything else that adds up over rows, by depth."""
        (params, first), (target, batch, teacher, shares) = theta, constants
        net = eagle_net(self.config, params)
        by_depth: list[dict[str, Array]] = []
        for depth, states in enumerate(rollouts(net, target.embed, batch, first, places, self.depths)):
            row = rollout_rows(batch, places, depth)
            logits = net.logits(states.reshape(-1, states.shape[2]), target.logits)
            agreed = agreement(logits, soft_labels(target, teacher, row.teachers))
            counted = agreement_rows(agreed, (row.supervised & live).reshape(-1))
            accepted = agreed.acceptance > 0
            log_acceptance = jnp.log(jnp.where(accepted, agreed.acceptance, 1))
            counted["log_acceptance"] = jnp.where(counted["known"], log_acceptance, 0)
            by_depth.append(counted)
        rows = {name: jnp.stack([d[name] for d in by_depth]).astype(jnp.float32) for name in by_depth[0]}
        sums = {name: jnp.sum(values, axis=1) for name, values in rows.items()}
        numerator = (
            jnp.sum(shares.cross_entropy * sums["cross_entropy"])
            + jnp.sum(shares.log_acceptance * sums["log_acceptance"])
            + jnp.sum(shares.missed * (sums["known"] - sums["acceptance"]))
        )
        return numerator, sums | {
            "accept": jnp.sum(jnp.cumprod(rows["correct"], axis=0)),
            "expected_accept": jnp.sum(jnp.cumprod(rows["acceptance"], axis=0)),
        }

    def _shares(self, batch: TrainBatch, sums: dict[str, Array] | None) -> "_Shares | None":
        """What the sums of each depth count in the numerator; None if that takes the sums, and there are none."""
        weights = self.decay ** jnp.arange(self.depths, dtype=jnp.float32)
        none = jnp.zeros_like(weights)
        if self.loss == "cross_entropy":
            return _Shares(cross_entropy=weights, log_acceptance=none, missed=none)
        if self.loss == "lk_alpha" and self.normaliser == "tokens":
            return _Shares(cross_entropy=none, log_acceptance=-weights, missed=none)
        if sums is None:
            return None
        known, acceptance, devices = sums["known"], sums["acceptance"], jnp.float32(1)
        if self.data_axis is not None:
            known, acceptance, devices = jax.lax.psum((known, acceptance, devices), self.data_axis)
        count = jnp.maximum(known, 1)
        of_depth = 1.0 if self.normaliser == "tokens" else 1 / count  # SpecForge: each depth's own mean
        if self.loss == "lk_alpha":
            return _Shares(cross_entropy=none, log_acceptance=-weights * of_depth, missed=none)
        share = self.kl_scale * jnp.exp(-self.kl_decay * acceptance / count)
        of_rows = 1.0 if self.normaliser == "tokens" else 1 / (batch.ids.size * devices)
        return _Shares(
            cross_entropy=weights * share * of_rows,
            log_acceptance=none,
            missed=weights * (1 - share) * of_depth,
        )

    def _combine(self, numerator: Array, sums: dict[str, Array], batch: TrainBatch) -> Terms:
        known, supervised = sums["known"], sums["supervised"]
        if self.normaliser == "tokens":
            denominator = jnp.sum(self.decay ** jnp.arange(self.depths, dtype=jnp.float32) * known)
        elif self.loss == "cross_entropy":
            denominator = jnp.float32(batch.ids.size)
        else:  # means already, the sum of which over devices counts as one
            devices = 1 if self.data_axis is None else jax.lax.psum(1, self.data_axis)
            denominator = jnp.float32(1) / devices
        metrics = agreement_metrics(sums) | {
            "accept_length": (sums["accept"], supervised[0]),
            "expected_accept_length": (sums["expected_accept"], supervised[0]),
        }
        return Terms(
            numerator=numerator,
            denominator=jax.lax.stop_gradient(denominator),
            metrics=jax.lax.stop_gradient(metrics),
        )


@pytree
class _Shares:
    """Factors of the sums of each depth in the numerator."""

    cross_entropy: Float[Array, "depths"]
    log_acceptance: Float[Array, "depths"]
    missed: Float[Array, "depths"]  # 1 - acceptance


def _shifted(mask: Bool[Array, "rows tokens"], places: int) -> Bool[Array, "rows tokens"]:
    """True where the token `places` earlier is."""
    tokens = mask.shape[1]
    return jnp.pad(mask, ((0, 0), (places, 0)))[:, :tokens]
