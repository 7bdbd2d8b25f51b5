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
from jaxtyping import Array, Float, Int, Key

from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash_net import DFlashConfig, DFlashNet, draft_logits
from jspec.drafters.domino_head import Gru
from jspec.drafters.sequential import Embed, correction, teacher_forced
from jspec.features import layer_outputs
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.blocks import Blocks, choose_anchors, position_weights
from jspec.objectives.draft_rows import DraftRows, check_window, draft_rows, training_embed
from jspec.objectives.frozen import Tables
from jspec.objectives.soft_labels import Teacher, read_teacher, soft_labels
from jspec.objectives.terms import Terms, summed_over_chunks
from jspec.objectives.weights import dpace_weights

DSparkLoss = Literal["dspark", "dpard"]
BINS = 10  # of the confidence, in the metrics


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkObjective:
    """The loss of a DSpark drafter over random anchors: a weighted mean over rows; see `terms`.

    "dspark" adds the three terms with their weights; row d counts exp(-d / gamma). "dpard" replaces the first two
    by -2 log sum sqrt(p q), and the weight of a row by how many tokens it still decides about, as D-PACE with the
    exact acceptance for the drafter's probability of the label (`jspec.objectives.weights`).

    Source: SpecForge a6b6b023, `OnlineDSparkModel`, D-PARD as in its commit 0124aa92; deepseek-ai/DeepSpec,
    `compute_dspark_loss`. Differences: one denominator for all terms, exact over micro-batches; for D-PARD, where
    SpecForge divides by the number of sequences and weighs the confidence by position, all terms share its weights.
    """

    config: DFlashConfig
    num_anchors: int = 512
    loss: DSparkLoss = "dspark"
    gamma: float | None = None  # of "dspark"; None = all rows alike
    cross_entropy_weight: float = 0.1  # of "dspark", as the next one
    l1_weight: float = 0.9
    confidence_weight: float = 1.0  # used if the drafter has a confidence head
    dpard_alpha: float = 0.5  # smoothing of the weights of "dpard"
    chunk_blocks: int = 128  # blocks whose logits are in memory at a time
    recompute: bool = False  # the block pass again in the backward pass, instead of keeping its activations

    def __post_init__(self) -> None:
        if self.config.selector is not None or isinstance(self.config.head, Gru):
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
        for name in ("num_anchors", "chunk_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        check_window(self.config)
        position_weights(self.config.block_size, self.gamma)

    @property
    def captured(self) -> tuple[str, ...]:
        """What a batch's features hold: the drafter's states, then what the target's head reads."""
        return (*layer_outputs(self.config.target_layer_ids), "final_norm")

    def __call__(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        key: Key[Array, ""],
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss over anchors drawn with `key`, which is consumed; `step` is not used."""
        return self.terms(params, target, batch, self.choose(batch, key), step)

    def choose(self, batch: TrainBatch, key: Key[Array, ""]) -> Blocks:
        """Random anchors of every row: `num_anchors`, or all that a short row can have."""
        uniforms = jax.random.uniform(key, batch.ids.shape)
        return choose_anchors(batch, uniforms, num_anchors=min(self.num_anchors, batch.ids.shape[1] - 1))

    def terms(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        blocks: Blocks,
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss over given anchors.

        Args:
          params: leaves of the drafter, in the order of `jspec.drafters.dflash.dflash_leaves`.
          target: embedding and head; `DraftTables` for a reduced vocabulary.
          batch: tokens and features, as `captured` names them.
          blocks: anchors.
          step: not used.
        """
        own, states = self._split(batch)
        net = dflash_net(self.config, params)
        rows = draft_rows(self.config, params, target, own, blocks, recompute=self.recompute)
        rows = dataclasses.replace(rows, mask=jnp.cumprod(rows.mask, axis=1))
        # One long row of tokens: a block's rows say where in it their predecessors are.
        flat = states.reshape(1, -1, states.shape[2])
        read = jnp.zeros(flat.shape[:2], jnp.int32).at[0, rows.before].add((rows.mask > 0).astype(jnp.int32))
        teacher = read_teacher(target, flat, read > 0)
        embed = training_embed(net, target)
        sums = summed_over_chunks(
            lambda piece: self._sums(piece, target, teacher, net, embed), rows, chunk=self.chunk_blocks
        )
        return self._combine(sums)

    def _split(self, batch: TrainBatch) -> tuple[TrainBatch, Float[Array, "rows tokens hidden"]]:
        width = len(self.config.target_layer_ids) * self.config.target_hidden_size
        given = batch.features.shape[2]
        if given != width + self.config.decoder.hidden_size:
            raise ValueError(
                f"features: expected width {width + self.config.decoder.hidden_size} ({', '.join(self.captured)}), "
                f"got {given}; capture these states"
            )
        return dataclasses.replace(batch, features=batch.features[:, :, :width]), batch.features[:, :, width:]

    def _sums(
        self, rows: DraftRows, target: Tables, teacher: Teacher, net: DFlashNet, embed: Embed
    ) -> dict[str, Array]:
        """Everything that adds up over blocks."""
        blocks, drafts, _ = rows.hidden.shape
        logits = draft_logits(self.config, target.logits(rows.hidden.reshape(blocks * drafts, -1)))
        logits, read = logits.reshape(blocks, drafts, -1), None
        if net.head is not None:
            read = net.head.read(rows.predecessors, embed)
            latents = teacher_forced(net.head, rows.hidden, read)
            logits = logits + correction(latents, net.head.output[...])
        labels = soft_labels(target, teacher, rows.before.reshape(1, -1))
        wanted = (labels.logits - labels.log_normaliser[:, None]).reshape(logits.shape)
        log_q = jax.nn.log_softmax(logits, axis=-1)
        q, p = jnp.exp(log_q), jnp.exp(wanted)
        gold = jnp.take_along_axis(log_q, jnp.maximum(rows.columns, 0)[:, :, None], axis=-1)[:, :, 0]
        cross_entropy = jnp.where(rows.columns >= 0, -gold, 0)
        # What the drafter cannot draft is the target's alone.
        l1 = jnp.sum(jnp.abs(q - p), axis=-1) + jnp.maximum(1 - jnp.sum(p, axis=-1), 0)
        accept = jax.lax.stop_gradient(jnp.clip(1 - l1 / 2, 0, 1))
        weights = self._weights(accept, rows.mask)
        if self.loss == "dspark":
            loss = self.cross_entropy_weight * cross_entropy + self.l1_weight * l1
        else:
            loss = -2 * jax.nn.logsumexp((log_q + wanted) / 2, axis=-1)
        best = jnp.argmax(log_q, axis=-1)
        correct = (best == rows.columns) * rows.mask
        sums = {
            "loss": jnp.sum(weights * loss),
            "weights": jnp.sum(weights),
            "cross_entropy_loss": jnp.sum(weights * cross_entropy),
            "l1_loss": jnp.sum(weights * l1),
            "rows": jnp.sum(rows.mask, axis=0),
            "blocks": jnp.sum(rows.mask[:, 0]),
            "cross_entropy": jnp.sum(cross_entropy * rows.mask, axis=0),
            "accuracy": jnp.sum(correct, axis=0),
            "acceptance": jnp.sum(accept * rows.mask, axis=0),
            "teacher_agreement": jnp.sum(
                (best == labels.columns.reshape(blocks, drafts)) * rows.mask, axis=0
            ),
            "teacher_top_prob": jnp.sum(jnp.max(p, axis=-1) * rows.mask, axis=0),
            "draft_top_prob": jnp.sum(jnp.max(q, axis=-1) * rows.mask, axis=0),
            "tau": jnp.sum(rows.mask[:, 0]) + jnp.sum(jnp.cumprod(accept * rows.mask, axis=1)),
            "accept_length": jnp.sum(jnp.cumprod(correct, axis=1)),
        }
        if net.confidence_head is not None:
            score = net.confidence_head.logits(rows.hidden, read)
            sums |= _confidence_sums(score, accept, rows.mask, weights)
        return sums

    def _weights(self, accept: Array, mask: Array) -> Array:
        if self.loss == "dpard":
            return dpace_weights(accept, mask > 0, alpha=self.dpard_alpha, form="dpace")
        return mask * position_weights(mask.shape[1] + 1, self.gamma)[None, 1:]

    def _combine(self, sums: dict[str, Array]) -> Terms:
        numerator, weights = sums["loss"], sums["weights"]
        by_row = ("cross_entropy", "accuracy", "acceptance", "teacher_agreement")
        metrics = {
            **{name: (sums[name], sums["rows"]) for name in (*by_row, "teacher_top_prob", "draft_top_prob")},
            **{name: (sums[name], weights) for name in ("cross_entropy_loss", "l1_loss")},
            "tau_probabilistic": (sums["tau"], sums["blocks"]),
            "accept_length": (sums["accept_length"], sums["blocks"]),
        }
        if "confidence_loss" in sums:
            numerator = numerator + self.confidence_weight * sums["confidence_loss"]
            metrics |= {
                "confidence_loss": (sums["confidence_loss"], weights),
                **{
                    name: (sums[name], sums["rows"])
                    for name in ("confidence_error", "confidence_bias", "survival_bias")
                },
                **{name: (sums[name], sums["bins"]) for name in ("binned_confidence", "binned_acceptance")},
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

    The bins hold, for each tenth of the confidence, how many rows fell into it, and the sums of their confidence and
    of their acceptance: a reliability plot, and what `calibration_error` reads.
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
    """Expected calibration error of the confidence: gap between confidence and acceptance, over bins of equal width.

    Args:
      terms: of a drafter with a confidence head, added up over as many batches as wanted.
    """
    (confidence, counts), (acceptance, _) = (
        terms.metrics[name] for name in ("binned_confidence", "binned_acceptance")
    )
    return jnp.sum(jnp.abs(confidence - acceptance)) / jnp.sum(counts)
