"""The training loss of DSpark: labels, the target's whole distribution, and how sure the drafter should be.

What each row learns, d counting draft tokens from 0, for the block at anchor a:

| term       | from                      | to                                                                       |
|------------|---------------------------|--------------------------------------------------------------------------|
| CE         | corrected logits of row d | token a + 1 + d                                                          |
| L1         | their softmax q           | p, the target's distribution after token a + d: its head on that token's |
|            |                           | captured "final_norm"                                                    |
| confidence | the confidence logit      | 1 - L1 / 2 = P(a draft from q is accepted), as a constant                |

The correction reads the true token before the row, a + d. A block counts up to its first token that is not
supervised. Gradients flow into backbone and heads from all three terms, the confidence's through its inputs
included; none into the target, its tables, or the third term's goal.
"""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash import dflash_net
from jspec.drafters.sequential import correction, teacher_forced
from jspec.net import Params
from jspec.objectives.batch import TrainBatch, split_features
from jspec.objectives.block_objective import BlockObjective
from jspec.objectives.blocks import Blocks, draft_weights
from jspec.objectives.draft_rows import (
    DraftRows,
    at_labels,
    draft_rows,
    hits,
    row_logits,
    summed_over_blocks,
    training_embed,
)
from jspec.objectives.frozen import Tables
from jspec.objectives.soft_labels import Teacher, read_teacher, soft_labels
from jspec.objectives.terms import Terms
from jspec.objectives.weights import dpace_weights

DSparkLoss = Literal["dspark", "dpard"]
BINS = 10  # of the confidence, in the metrics
BINNED = ("binned_confidence", "binned_acceptance")  # metrics by bin, not by draft token


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkObjective(BlockObjective):
    """The loss of a DSpark drafter over random anchors: a weighted mean over rows; see `terms`.

    "dspark" adds the three terms with their weights; `gamma` is its own. "dpard" replaces the first two
    by -2 log sum sqrt(p q), and the weight of a row by how many tokens it still decides about, as D-PACE with
    the exact acceptance for the drafter's probability of the label (`jspec.objectives.weights`).

    Source: SpecForge a6b6b023, `OnlineDSparkModel`, D-PARD as in its commit 0124aa92; deepseek-ai/DeepSpec,
    `compute_dspark_loss`. Differences: one denominator for all terms, exact over micro-batches; for D-PARD,
    where SpecForge divides by the number of sequences and weighs the confidence by position, all terms share
    its weights.
    """

    loss: DSparkLoss = "dspark"
    cross_entropy_weight: float = 0.1  # of "dspark", as the next one
    l1_weight: float = 0.9
    confidence_weight: float = 1.0  # used if the drafter has a confidence head
    dpard_alpha: float = 0.5  # smoothing of the weights of "dpard"

    def __post_init__(self) -> None:
        super().__post_init__()
        of_kind = self.config.method == "DSpark" or (
            self.config.method == "DFlash" and self.config.anchor_predicts
        )
        if not of_kind:
            raise ValueError(f"config: expected a DSpark drafter, got ({self.config.identity})")
        if self.loss not in get_args(DSparkLoss):
            raise ValueError(f"loss: expected one of {', '.join(get_args(DSparkLoss))}, got {self.loss!r}")
        for name in ("cross_entropy_weight", "l1_weight", "confidence_weight"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: expected at least 0, got {getattr(self, name)}")
        if self.loss == "dspark" and self.cross_entropy_weight + self.l1_weight == 0:
            raise ValueError("cross_entropy_weight, l1_weight: expected one above 0, got 0 and 0")
        if self.loss == "dpard" and self.gamma is not None:
            raise ValueError(f"gamma: expected None with loss 'dpard', got {self.gamma}; drop one")
        if not 0 < self.dpard_alpha < 1:
            raise ValueError(f"dpard_alpha: expected between 0 and 1, got {self.dpard_alpha}")

    @property
    def captured(self) -> tuple[str, ...]:
        """What a batch's features hold: the drafter's states, then what the target's head reads."""
        return (*super().captured, "final_norm")

    def terms(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        blocks: Blocks,
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """See `BlockObjective.terms`."""
        read, states = split_features(batch, self.captured, self.config.target_hidden_size)
        own = dataclasses.replace(batch, features=read)
        rows = draft_rows(self.config, params, target, own, blocks, recompute=self.recompute)
        rows = dataclasses.replace(rows, mask=jnp.cumprod(rows.mask, axis=1) > 0)
        # One long row of tokens: a block's rows say where in it their predecessors are.
        flat = states.reshape(1, -1, states.shape[2])
        wanted = jnp.zeros(flat.shape[:2], jnp.bool_).at[0, rows.before].max(rows.mask)
        teacher = read_teacher(target, flat, wanted)
        numerator, sums = summed_over_blocks(
            self._sums, params, (target, teacher), rows, chunk=self.chunk_blocks
        )
        return self._combine(numerator, sums)

    def _sums(
        self, params: Params, constants: tuple[Tables, Teacher], rows: DraftRows
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The numerator, and everything else that adds up over blocks."""
        target, teacher = constants
        net = dflash_net(self.config, params)
        logits, read = row_logits(self.config, target, rows.hidden), None
        if net.head is not None:
            read = net.head.read(rows.predecessors, training_embed(net, target))
            latents = teacher_forced(net.head, rows.hidden, read)
            logits = logits + correction(latents, net.head.output[...])
        labels = soft_labels(target, teacher, rows.before.reshape(1, -1))
        wanted = (labels.logits - labels.log_normaliser[:, None]).reshape(logits.shape)
        log_q = jax.nn.log_softmax(logits, axis=-1)
        q, p = jnp.exp(log_q), jnp.exp(wanted)
        cross_entropy = jnp.where(rows.columns >= 0, -at_labels(log_q, rows.columns), 0)
        # What the drafter cannot draft is the target's alone.
        l1 = jnp.sum(jnp.abs(q - p), axis=-1) + jnp.maximum(1 - jnp.sum(p, axis=-1), 0)
        accept = jax.lax.stop_gradient(jnp.clip(1 - l1 / 2, 0, 1))
        mask = rows.mask.astype(jnp.float32)
        weights = self._weights(accept, rows.mask)
        if self.loss == "dspark":
            loss = self.cross_entropy_weight * cross_entropy + self.l1_weight * l1
        else:
            loss = -2 * jax.nn.logsumexp((log_q + wanted) / 2, axis=-1)
        correct = hits(log_q, rows)
        agrees = jnp.argmax(log_q, axis=-1) == labels.columns.reshape(rows.columns.shape)
        sums = {
            "weights": jnp.sum(weights),
            "cross_entropy_loss": jnp.sum(weights * cross_entropy),
            "l1_loss": jnp.sum(weights * l1),
            "rows": jnp.sum(mask, axis=0),
            "blocks": jnp.sum(mask[:, 0]),
            "cross_entropy": jnp.sum(cross_entropy * mask, axis=0),
            "accuracy": jnp.sum(correct, axis=0),
            "acceptance": jnp.sum(accept * mask, axis=0),
            "teacher_agreement": jnp.sum(agrees * mask, axis=0),
            "teacher_top_prob": jnp.sum(jnp.max(p, axis=-1) * mask, axis=0),
            "draft_top_prob": jnp.sum(jnp.max(q, axis=-1) * mask, axis=0),
            "tau": jnp.sum(mask[:, 0]) + jnp.sum(jnp.cumprod(accept * mask, axis=1)),
            "accept_length": jnp.sum(jnp.cumprod(correct, axis=1)),
        }
        numerator = jnp.sum(weights * loss)
        if net.confidence_head is not None:
            score = net.confidence_head.logits(rows.hidden, read)
            sums |= _confidence_sums(score, accept, mask, weights)
            numerator = numerator + self.confidence_weight * sums["confidence_loss"]
        return numerator, sums

    def _weights(self, accept: Array, mask: Array) -> Array:
        if self.loss == "dpard":
            return dpace_weights(accept, mask, alpha=self.dpard_alpha, form="dpace")
        return mask * draft_weights(mask.shape[1], self.gamma)[None]

    def _combine(self, numerator: Array, sums: dict[str, Array]) -> Terms:
        weights = sums["weights"]
        by_row = ("cross_entropy", "accuracy", "acceptance", "teacher_agreement")
        metrics = {
            **{name: (sums[name], sums["rows"]) for name in (*by_row, "teacher_top_prob", "draft_top_prob")},
            **{name: (sums[name], weights) for name in ("cross_entropy_loss", "l1_loss")},
            "tau_probabilistic": (sums["tau"], sums["blocks"]),
            "accept_length": (sums["accept_length"], sums["blocks"]),
        }
        if "confidence_loss" in sums:
            metrics |= {
                "confidence_loss": (sums["confidence_loss"], weights),
                **{
                    name: (sums[name], sums["rows"])
                    for name in ("confidence_error", "confidence_bias", "survival_bias")
                },
                **{name: (sums[name], sums["bins"]) for name in BINNED},
            }
        return Terms(
            numerator=numerator,
            denominator=jax.lax.stop_gradient(weights),
            metrics=jax.lax.stop_gradient(metrics),
        )


def _confidence_sums(
    score: Float[Array, "blocks drafts"],
    accept: Float[Array, "blocks drafts"],
    mask: Float[Array, "blocks drafts"],
    weights: Float[Array, "blocks drafts"],
) -> dict[str, Array]:
    """Cross-entropy of the confidence with the acceptance, and how well it is calibrated.

    The bins hold, for each tenth of the confidence, how many rows fell into it, and the sums of their
    confidence and of their acceptance: a reliability plot, and what `calibration_error` reads.
    """
    confidence = jax.nn.sigmoid(score)
    survival = jnp.cumprod(confidence * mask, axis=1) - jnp.cumprod(accept * mask, axis=1)
    inside = jnp.minimum((confidence * BINS).astype(jnp.int32), BINS - 1)
    member = jax.nn.one_hot(inside, BINS) * mask[:, :, None]
    return {
        "confidence_loss": jnp.sum(weights * (jax.nn.softplus(score) - score * accept)),
        "confidence_error": jnp.sum(jnp.abs(confidence - accept) * mask, axis=0),
        "confidence_bias": jnp.sum((confidence - accept) * mask, axis=0),
        "survival_bias": jnp.sum(survival * mask, axis=0),
        "bins": jnp.sum(member, axis=(0, 1)),
        "binned_confidence": jnp.sum(member * confidence[:, :, None], axis=(0, 1)),
        "binned_acceptance": jnp.sum(member * accept[:, :, None], axis=(0, 1)),
    }


def calibration_error(terms: Terms) -> Float[Array, ""]:
    """Expected calibration error of the confidence: its gap to the acceptance, over bins of equal width.

    Args:
      terms: of a drafter with a confidence head, added up over as many batches as wanted.
    """
    (confidence, counts), (acceptance, _) = (terms.metrics[name] for name in BINNED)
    return jnp.sum(jnp.abs(confidence - acceptance)) / jnp.sum(counts)
