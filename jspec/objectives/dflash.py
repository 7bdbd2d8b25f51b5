"""The training losses of DFlash and DFlash 2: one step's numerator, denominator and metrics."""

import dataclasses
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash2_lattice import Candidates, top_candidates
from jspec.drafters.dflash2_layers import CandidateSelector
from jspec.drafters.dflash_net import DFlashNet
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.block_objective import BlockObjective
from jspec.objectives.blocks import Blocks, draft_weights
from jspec.objectives.draft_rows import (
    DraftRows,
    at_labels,
    draft_rows,
    hits,
    row_logits,
    summed_over_blocks,
)
from jspec.objectives.frozen import Tables
from jspec.objectives.terms import Terms
from jspec.objectives.weights import WEIGHTINGS, Weighting, dpace_weights

TokenLoss = Literal["cross_entropy", "lk_alpha", "lk_lambda", "lk_tv"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class SelectorTerm:
    """The share of DFlash 2's selector in the loss.

    alpha is 0 for `warmup_ratio` of the steps, then rises linearly over `ramp_ratio` of them. While
    it is 0 the selector's parameters have no gradient.
    """

    alpha: float = 1.0
    warmup_ratio: float = 0.0
    ramp_ratio: float = 0.0
    stop_gradient: bool = False  # keeps the term's gradient out of the backbone

    def __post_init__(self) -> None:
        if not self.alpha >= 0:
            raise ValueError(f"alpha: expected at least 0, got {self.alpha}; 0 leaves the selector untrained")
        for name in ("warmup_ratio", "ramp_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected 0 to 1 (a share of all steps), got {getattr(self, name)}")

    def at(self, step: Int[Array, ""] | int, total_steps: int) -> Float[Array, ""]:
        """alpha at an update, counted from 0."""
        warmup, ramp = int(total_steps * self.warmup_ratio), int(total_steps * self.ramp_ratio)
        step = jnp.asarray(step, jnp.float32)
        risen = jnp.clip((step - warmup + 1) / ramp, 0, 1) if ramp else 1.0
        return jnp.where(step < warmup, 0.0, self.alpha * risen)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashObjective(BlockObjective):
    """The loss of a DFlash or DFlash 2 drafter over random anchors. The defaults are SpecForge's.

    `gamma` is of the weighting "position".

    Source: SpecForge a6b6b023, `OnlineDFlashModel`; the selector term, LK and the denominator of
    D-PACE as in its commit 0124aa92.
    """

    loss: TokenLoss = "cross_entropy"
    weighting: Weighting = "position"
    dpace_alpha: float = 0.5
    dpace_denominator: Literal["weights", "rows"] = (
        "weights"  # "rows": token rows of the batch, as in older versions
    )
    kl_scale: float = 1.0  # of "lk_lambda"
    kl_decay: float = 1.0
    selector: SelectorTerm = SelectorTerm()  # used if the drafter has a selector
    total_steps: int = 1  # updates of the whole run, for the selector's schedule
    data_axis: str | None = (
        None  # mesh axis that splits the rows, where called under shard_map; "lk_lambda" needs it
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss not in get_args(TokenLoss):
            raise ValueError(f"loss: expected one of {', '.join(get_args(TokenLoss))}, got {self.loss!r}")
        if self.weighting not in WEIGHTINGS:
            raise ValueError(f"weighting: expected one of {', '.join(WEIGHTINGS)}, got {self.weighting!r}")
        if not 0 <= self.dpace_alpha <= 1:
            raise ValueError(f"dpace_alpha: expected 0 to 1, got {self.dpace_alpha}")
        if self.dpace_denominator not in ("weights", "rows"):
            raise ValueError(
                f"dpace_denominator: expected 'weights' or 'rows', got {self.dpace_denominator!r}"
            )
        if self.weighting != "position" and self.gamma is not None:
            raise ValueError(
                f"gamma: expected None with weighting {self.weighting!r}, got {self.gamma}; drop one"
            )
        if self.total_steps < 1:
            raise ValueError(f"total_steps: expected at least 1, got {self.total_steps}")
        if self.config.method not in ("DFlash", "DFlash 2"):
            raise ValueError(
                f"config: expected a DFlash or DFlash 2 drafter, got ({self.config.identity}); see "
                "jspec.objectives.dspark and jspec.objectives.domino"
            )
        if self.config.anchor_predicts:
            raise ValueError(
                "config.anchor_predicts: expected False, got True; such drafters are trained as DSpark is"
            )

    def terms(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        blocks: Blocks,
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """See `BlockObjective.terms`."""
        rows = draft_rows(self.config, params, target, batch, blocks, recompute=self.recompute)
        alpha = self.selector.at(step, self.total_steps)

        def summed(params: Params, rows: DraftRows, share: Array) -> tuple[Array, dict[str, Array]]:
            constants = target, share, alpha
            return summed_over_blocks(self._sums, params, constants, rows, chunk=self.chunk_blocks)

        share = jnp.float32(1)
        if self.loss == "lk_lambda":  # depends on all rows: they are looked at before
            share = self._share(summed(*jax.lax.stop_gradient((params, rows)), share)[1])
        numerator, sums = summed(params, rows, share)
        return self._combine(numerator, sums, batch.ids.shape[0])

    def _share(self, sums: dict[str, Array]) -> Float[Array, ""]:
        """What of "lk_lambda" is cross-entropy: less, the more probable the labels are."""
        prob, supervised = jnp.sum(sums["label_prob"]), jnp.sum(sums["supervised"])
        if self.data_axis is not None:
            prob, supervised = jax.lax.psum((prob, supervised), self.data_axis)
        return self.kl_scale * jnp.exp(-self.kl_decay * prob / jnp.maximum(supervised, 1))

    def _sums(
        self, params: Params, constants: tuple[Tables, Array, Array], rows: DraftRows
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The numerator, and everything else that adds up over blocks.

        A label that cannot be drafted has no weight in the loss, but counts as missed in the metrics.
        """
        target, share, alpha = constants
        logits = row_logits(self.config, target, rows.hidden)
        normaliser = jax.nn.logsumexp(logits, axis=-1)
        mask, known = rows.mask.astype(jnp.float32), (rows.columns >= 0).astype(jnp.float32)
        gold = at_labels(logits, rows.columns)
        cross_entropy, prob = normaliser - gold, jnp.exp(gold - normaliser) * known
        weights = self._weights(prob, rows.mask) * known
        correct = hits(logits, rows)
        probs_if_supervised = jax.lax.stop_gradient(prob) * mask
        sums = {
            "weights": jnp.sum(weights),
            "supervised": jnp.sum(mask, axis=0),
            "correct": jnp.sum(correct, axis=0),
            "label_prob": jnp.sum(probs_if_supervised, axis=0),
            "blocks": jnp.sum(jnp.any(rows.mask, axis=1).astype(jnp.float32)),
            "expected_accept": jnp.sum(jnp.cumprod(probs_if_supervised, axis=1)),
            "accept": jnp.sum(jnp.cumprod(correct, axis=1)),
        }
        loss = cross_entropy
        if self.loss == "lk_tv":
            loss = 1 - prob
        elif self.loss == "lk_lambda":
            loss = share * cross_entropy + (1 - share) * (1 - prob)
        numerator = jnp.sum(weights * loss)
        if self.config.selector is not None:
            selected, more = self._selector_sums(rows, logits, weights, dflash_net(self.config, params))
            numerator, sums = numerator + alpha * selected, sums | more
        return numerator, sums

    def _weights(self, prob: Array, mask: Array) -> Array:
        if self.weighting == "position":
            return mask * draft_weights(mask.shape[1], self.gamma)[None]
        return dpace_weights(prob, mask, alpha=self.dpace_alpha, form=self.weighting)

    def _selector_sums(
        self, rows: DraftRows, logits: Array, weights: Array, net: DFlashNet
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The label among the top K candidates, given its true predecessor.

        The top K are strict: a label outside has no term here, and is not added to the candidates,
        because decoding could not choose it either.
        """
        selector = net.candidate_selector
        assert self.config.selector is not None and selector is not None
        hidden = rows.hidden
        if self.selector.stop_gradient:
            logits, hidden = jax.lax.stop_gradient((logits, hidden))
        best_columns = top_candidates(logits, self.config.selector.top_k)
        candidates = Candidates(ids=net.target_ids(best_columns.ids), unary=best_columns.unary)
        projected = selector.project(hidden)
        scores = selector.scores(projected, rows.predecessors, candidates.ids, candidates.unary)
        is_label = candidates.ids == rows.labels[:, :, None]
        covered = (jnp.any(is_label, axis=-1) & rows.mask).astype(jnp.float32)
        gold = jnp.sum(jnp.where(is_label, scores, 0), axis=-1)
        cross_entropy = (jax.nn.logsumexp(scores, axis=-1) - gold) * covered
        best = jnp.take_along_axis(candidates.ids, jnp.argmax(scores, axis=-1)[..., None], axis=-1)[..., 0]
        walked = _greedy_walk(selector, jax.lax.stop_gradient(projected), candidates, rows.predecessors[:, 0])
        followed = ((walked == rows.labels) & rows.mask).astype(jnp.float32)
        return jnp.sum(weights * cross_entropy), {
            "covered": jnp.sum(covered, axis=0),
            "selector_correct": jnp.sum((best == rows.labels) * covered, axis=0),
            "oracle_accept": jnp.sum(jnp.cumprod(covered, axis=1)),
            "walk_accept": jnp.sum(jnp.cumprod(followed, axis=1)),
        }

    def _combine(self, numerator: Array, sums: dict[str, Array], rows: int) -> Terms:
        denominator = sums["weights"]
        if self.weighting != "position" and self.dpace_denominator == "rows":
            denominator = jnp.asarray(rows, jnp.float32)
        blocks = sums["blocks"]
        metrics = {
            "accuracy": (sums["correct"], sums["supervised"]),
            "label_prob": (sums["label_prob"], sums["supervised"]),
            "accept_length": (sums["accept"], blocks),
            "expected_accept_length": (sums["expected_accept"], blocks),
        }
        if "covered" in sums:
            metrics |= {
                "coverage": (sums["covered"], sums["supervised"]),
                "selector_accuracy": (sums["selector_correct"], sums["covered"]),
                "oracle_accept_length": (sums["oracle_accept"], blocks),
                "walk_accept_length": (sums["walk_accept"], blocks),
            }
        return Terms(
            numerator=numerator,
            denominator=jax.lax.stop_gradient(denominator),
            metrics=jax.lax.stop_gradient(metrics),
        )


def _greedy_walk(
    selector: CandidateSelector, projected: Array, candidates: Candidates, anchors: Int[Array, "blocks"]
) -> Int[Array, "blocks drafts"]:
    """The tokens that greedy decoding would draft: each row's best candidate after the one drafted before."""

    def step(before: Array, row: tuple[Array, Array, Array]) -> tuple[Array, Array]:
        query, ids, unary = row
        best = jnp.argmax(selector.scores(query, before, ids, unary), axis=-1)
        token = jnp.take_along_axis(ids, best[:, None], axis=1)[:, 0]
        return token, token

    by_row = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), (projected, candidates.ids, candidates.unary))
    return jax.lax.scan(step, anchors, by_row)[1].T
