"""The training loss of EAGLE-3: test-time training of any depth."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from jspec.drafters.eagle_net import EagleConfig, EagleNet, eagle_net
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.eagle_pass import FirstPass, first_pass, rollouts
from jspec.objectives.frozen import Tables
from jspec.objectives.rollouts import all_places, rollout_rows
from jspec.objectives.soft_labels import (
    Teacher,
    agreement,
    check_tables,
    read_teacher,
    soft_labels,
    split_features,
)
from jspec.objectives.terms import Terms, summed_over_chunks
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
        net = eagle_net(self.config, params)
        check_tables(self.config.draft_vocab_size, target)
        features, last = split_features(self.config, batch)
        first = first_pass(net, target.embed, batch, features)
        places = all_places(batch)
        live = jnp.zeros(places.shape, jnp.bool_)
        wanted = jnp.zeros(places.shape, jnp.bool_)
        for depth in range(self.depths):
            supervised = rollout_rows(batch, places, depth).supervised
            live, wanted = live | supervised, wanted | _shifted(supervised, depth + 1)
        teacher = read_teacher(target, last, wanted)
        # Rows that learn something first: chunks of the others are not computed.
        order = jnp.argsort(~live, axis=1, stable=True)
        work = _Work(places=order.T, live=jnp.take_along_axis(live, order, axis=1).T)
        sums = summed_over_chunks(
            lambda piece: self._sums(piece, net, target, batch, first, teacher),
            work,
            chunk=self.chunk,
            live=jnp.any(work.live, axis=1),
        )
        return self._combine(sums, batch)

    def _sums(
        self,
        work: "_Work",
        net: EagleNet,
        target: Tables,
        batch: TrainBatch,
        first: FirstPass,
        teacher: Teacher,
    ) -> dict[str, Array]:
        """Everything that adds up over rows, by depth."""
        places, live = work.places.T, work.live.T.reshape(-1)
        by_depth: list[dict[str, Array]] = []
        for depth, states in enumerate(rollouts(net, target.embed, batch, first, places, self.depths)):
            row = rollout_rows(batch, places, depth)
            logits = net.logits(states.reshape(-1, states.shape[2]), target.logits)
            agreed = agreement(logits, soft_labels(target, teacher, row.teachers))
            supervised = row.supervised.reshape(-1) & live
            known = supervised & agreed.known
            accepted = agreed.acceptance > 0
            by_depth.append(
                {
                    "supervised": supervised,
                    "known": known,
                    "cross_entropy": jnp.where(known, agreed.cross_entropy, 0),
                    "acceptance": jnp.where(known, agreed.acceptance, 0),
                    "log_acceptance": jnp.where(
                        known & accepted, jnp.log(jnp.where(accepted, agreed.acceptance, 1)), 0
                    ),
                    "correct": supervised & agreed.correct,
                }
            )
        rows = {name: jnp.stack([d[name] for d in by_depth]).astype(jnp.float32) for name in by_depth[0]}
        sums = {name: jnp.sum(values, axis=1) for name, values in rows.items()}
        return sums | {
            "accept": jnp.sum(jnp.cumprod(rows["correct"], axis=0)),
            "expected_accept": jnp.sum(jnp.cumprod(rows["acceptance"], axis=0)),
        }

    def _combine(self, sums: dict[str, Array], batch: TrainBatch) -> Terms:
        known, weights = sums["known"], self.decay ** jnp.arange(self.depths, dtype=jnp.float32)
        numerator, denominator = self._ratio(sums, batch, weights)
        supervised = sums["supervised"]
        metrics = {
            "cross_entropy": (sums["cross_entropy"], known),
            "accuracy": (sums["correct"], supervised),
            "accuracy_of_drafted": (sums["correct"], known),
            "drafted": (known, supervised),
            "acceptance": (sums["acceptance"], known),
            "accept_length": (sums["accept"], supervised[0]),
            "expected_accept_length": (sums["expected_accept"], supervised[0]),
        }
        return Terms(
            numerator=numerator,
            denominator=jax.lax.stop_gradient(denominator),
            metrics=jax.lax.stop_gradient(metrics),
        )

    def _ratio(self, sums: dict[str, Array], batch: TrainBatch, weights: Array) -> tuple[Array, Array]:
        known, devices = sums["known"], jnp.float32(1)
        acceptance = jax.lax.stop_gradient(sums["acceptance"])
        if self.data_axis is not None and self.loss != "cross_entropy":
            known, acceptance, devices = jax.lax.psum((known, acceptance, devices), self.data_axis)
        mean = acceptance / jnp.maximum(known, 1)
        share = self.kl_scale * jnp.exp(-self.kl_decay * mean)
        # At each depth: what it adds up to with the weight that "tokens" gives its rows ...
        of_rows = {"cross_entropy": sums["cross_entropy"], "lk_alpha": -sums["log_acceptance"]}
        missed = sums["known"] - sums["acceptance"]
        of_rows["lk_lambda"] = share * sums["cross_entropy"] + (1 - share) * missed
        if self.normaliser == "tokens":
            return jnp.sum(weights * of_rows[self.loss]), jnp.sum(weights * sums["known"])
        # ... or each depth's own mean, as SpecForge has it.
        positions = jnp.float32(batch.ids.size)
        if self.loss == "cross_entropy":
            return jnp.sum(weights * sums["cross_entropy"]), positions
        of_depth = jnp.maximum(known, 1)
        means = {
            "lk_alpha": -sums["log_acceptance"] / of_depth,
            "lk_lambda": share * sums["cross_entropy"] / (positions * devices)
            + (1 - share) * missed / of_depth,
        }
        return jnp.sum(weights * means[self.loss]), 1 / devices


@pytree
class _Work:
    """Some places of every token row; rows and places are swapped, as chunks are taken of the first axis."""

    places: Int[Array, "places rows"]
    live: Bool[Array, "places rows"]


def _shifted(mask: Bool[Array, "rows tokens"], places: int) -> Bool[Array, "rows tokens"]:
    """True where the token `places` earlier is."""
    tokens = mask.shape[1]
    return jnp.pad(mask, ((0, 0), (places, 0)))[:, :tokens]
