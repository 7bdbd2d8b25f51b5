"""The training loss of Domino: cross-entropy before and after the correction, blended by a schedule."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.dflash import dflash_net
from jspec.drafters.domino_head import Gru
from jspec.drafters.sequential import correction, teacher_forced
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
    training_embed,
)
from jspec.objectives.frozen import Tables
from jspec.objectives.terms import Terms


@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoObjective(BlockObjective):
    """The loss of a Domino drafter over random anchors: l x base + (1 - l) x corrected cross-entropy.

    l begins at `base_start` and falls linearly to 0 over `base_ratio` of the updates, so that the backbone
    learns before the head leans on it. A token that is not supervised has no weight, those behind it do.

    Source: SpecForge a6b6b023, `OnlineDominoModel`; without its 1e-6 in the denominator.
    """

    base_start: float = 1.0
    base_ratio: float = 0.5
    total_steps: int = 1  # updates of the whole run

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.config.head, Gru):
            raise ValueError(f"config: expected a Domino drafter, got ({self.config.identity})")
        for name in ("base_start", "base_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected 0 to 1, got {getattr(self, name)}")
        if self.total_steps < 1:
            raise ValueError(f"total_steps: expected at least 1, got {self.total_steps}")

    def base_share(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """l at an update, counted from 0."""
        horizon = max(int(self.total_steps * self.base_ratio), 1)
        return self.base_start * jnp.clip(1 - jnp.asarray(step, jnp.float32) / horizon, 0, 1)

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
        constants = target, self.base_share(step)
        numerator, sums = summed_over_blocks(self._sums, params, constants, rows, chunk=self.chunk_blocks)
        metrics = {
            "accuracy": (sums["correct"], sums["supervised"]),
            "base_accuracy": (sums["base_correct"], sums["supervised"]),
            "cross_entropy": (sums["corrected"], sums["weights"]),
            "base_cross_entropy": (sums["base"], sums["weights"]),
            "accept_length": (sums["accept"], sums["blocks"]),
            "base_accept_length": (sums["base_accept"], sums["blocks"]),
        }
        return Terms(
            numerator=numerator,
            denominator=jax.lax.stop_gradient(sums["weights"]),
            metrics=jax.lax.stop_gradient(metrics),
        )

    def _sums(
        self, params: Params, constants: tuple[Tables, Array], rows: DraftRows
    ) -> tuple[Float[Array, ""], dict[str, Array]]:
        """The numerator, and everything else that adds up over blocks.

        A label that cannot be drafted has no weight, but is missed.
        """
        target, share = constants
        net = dflash_net(self.config, params)
        embed = training_embed(net, target)
        assert net.head is not None
        base = row_logits(self.config, target, rows.hidden)
        latents = teacher_forced(net.head, rows.hidden, net.head.read(rows.predecessors, embed))
        corrected = base + correction(latents, net.head.output[...])
        weights = (rows.mask & (rows.columns >= 0)) * draft_weights(rows.mask.shape[1], self.gamma)[None]
        sums = {
            "weights": jnp.sum(weights),
            "supervised": jnp.sum(rows.mask, axis=0, dtype=jnp.float32),
            "blocks": jnp.sum(jnp.any(rows.mask, axis=1).astype(jnp.float32)),
        }
        for prefix, logits in (("base_", base), ("", corrected)):
            gold = at_labels(jax.nn.log_softmax(logits, axis=-1), rows.columns)
            correct = hits(logits, rows)
            sums["corrected" if not prefix else "base"] = jnp.sum(-weights * gold)
            sums[f"{prefix}correct"] = jnp.sum(correct, axis=0)
            sums[f"{prefix}accept"] = jnp.sum(jnp.cumprod(correct, axis=1))
        return (1 - share) * sums["corrected"] + share * sums["base"], sums
