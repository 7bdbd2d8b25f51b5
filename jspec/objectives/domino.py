"""The training loss of Domino: cross-entropy before and after the correction, blended by a schedule."""

import dataclasses

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
from jspec.objectives.terms import Terms, summed_over_chunks


@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoObjective:
    """The loss of a Domino drafter over random anchors: l x base + (1 - l) x corrected cross-entropy.

    l begins at `base_start` and falls linearly to 0 over `base_ratio` of the updates, so that the backbone learns
    before the head leans on it. Draft token d counts exp(-d / gamma); a token that is not supervised has no
    weight, those behind it do.

    Source: SpecForge a6b6b023, `OnlineDominoModel`; without its 1e-6 in the denominator.
    """

    config: DFlashConfig
    num_anchors: int = 512
    gamma: float | None = None  # None = all rows alike
    base_start: float = 1.0
    base_ratio: float = 0.5
    total_steps: int = 1  # updates of the whole run
    chunk_blocks: int = 128  # blocks whose logits are in memory at a time
    recompute: bool = False  # the block pass again in the backward pass, instead of keeping its activations

    def __post_init__(self) -> None:
        if not isinstance(self.config.head, Gru):
            raise ValueError(f"config: expected a Domino drafter, got ({self.config.identity})")
        for name in ("base_start", "base_ratio"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name}: expected 0 to 1, got {getattr(self, name)}")
        for name in ("num_anchors", "total_steps", "chunk_blocks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: expected at least 1, got {getattr(self, name)}")
        check_window(self.config)
        position_weights(self.config.block_size, self.gamma)

    @property
    def captured(self) -> tuple[str, ...]:
        """What a batch's features hold: the drafter's states."""
        return layer_outputs(self.config.target_layer_ids)

    def base_share(self, step: Int[Array, ""] | int) -> Float[Array, ""]:
        """l at an update, counted from 0."""
        horizon = max(int(self.total_steps * self.base_ratio), 1)
        return self.base_start * jnp.clip(1 - jnp.asarray(step, jnp.float32) / horizon, 0, 1)

    def __call__(
        self,
        params: Params,
        target: Tables,
        batch: TrainBatch,
        key: Key[Array, ""],
        step: Int[Array, ""] | int = 0,
    ) -> Terms:
        """The loss over anchors drawn with `key`, which is consumed; `step` is the update, counted from 0."""
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
          batch: tokens and features.
          blocks: anchors.
          step: update that this batch belongs to, counted from 0.
        """
        net = dflash_net(self.config, params)
        rows = draft_rows(self.config, params, target, batch, blocks, recompute=self.recompute)
        embed = training_embed(net, target)
        sums = summed_over_chunks(
            lambda piece: self._sums(piece, target, net, embed), rows, chunk=self.chunk_blocks
        )
        share = self.base_share(step)
        metrics = {
            "accuracy": (sums["correct"], sums["supervised"]),
            "base_accuracy": (sums["base_correct"], sums["supervised"]),
            "cross_entropy": (sums["corrected"], sums["weights"]),
            "base_cross_entropy": (sums["base"], sums["weights"]),
            "accept_length": (sums["accept"], sums["blocks"]),
            "base_accept_length": (sums["base_accept"], sums["blocks"]),
        }
        return Terms(
            numerator=(1 - share) * sums["corrected"] + share * sums["base"],
            denominator=jax.lax.stop_gradient(sums["weights"]),
            metrics=jax.lax.stop_gradient(metrics),
        )

    def _sums(self, rows: DraftRows, target: Tables, net: DFlashNet, embed: Embed) -> dict[str, Array]:
        """Everything that adds up over blocks. A label that cannot be drafted has no weight, but is missed."""
        blocks, drafts, _ = rows.hidden.shape
        assert net.head is not None
        base = draft_logits(self.config, target.logits(rows.hidden.reshape(blocks * drafts, -1)))
        base = base.reshape(blocks, drafts, -1)
        latents = teacher_forced(net.head, rows.hidden, net.head.read(rows.predecessors, embed))
        corrected = base + correction(latents, net.head.output[...])
        weights = rows.mask * (rows.columns >= 0) * position_weights(drafts + 1, self.gamma)[None, 1:]
        sums = {
            "weights": jnp.sum(weights),
            "supervised": jnp.sum(rows.mask, axis=0),
            "blocks": jnp.sum(jnp.any(rows.mask > 0, axis=1).astype(jnp.float32)),
        }
        for prefix, logits in (("base_", base), ("", corrected)):
            log_q = jax.nn.log_softmax(logits, axis=-1)
            gold = jnp.take_along_axis(log_q, jnp.maximum(rows.columns, 0)[:, :, None], axis=-1)[:, :, 0]
            correct = (jnp.argmax(logits, axis=-1) == rows.columns) * rows.mask
            sums["corrected" if not prefix else "base"] = jnp.sum(-weights * gold)
            sums[f"{prefix}correct"] = jnp.sum(correct, axis=0)
            sums[f"{prefix}accept"] = jnp.sum(jnp.cumprod(correct, axis=1))
        return sums
