"""DFlash, DFlash 2, DSpark and Domino in the training program: blocks drafted in one pass of a DFlash backbone."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.checkpoints.dflash import drafter_of, load_dflash
from jspec.checkpoints.dflash_save import save_dflash
from jspec.checkpoints.target import LoadedTarget
from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash_init import init_dflash_params, init_from_target, upgrade_dflash_params
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.protocol import Drafter
from jspec.features import layer_outputs
from jspec.net import Leaf, Params
from jspec.objectives.block_objective import BlockObjective
from jspec.objectives.dflash import DFlashObjective, SelectorTerm
from jspec.objectives.domino import DominoObjective
from jspec.objectives.dspark import DSparkObjective
from jspec_train.drafters import other_sizes
from jspec_train.methods.samples import LOOKED_AT, look_at
from jspec_train.recipe import DFlashRecipe, DominoRecipe, DSparkRecipe
from jspec_train.samples import SampleSource

BlockRecipe = DFlashRecipe | DSparkRecipe | DominoRecipe
# Tables of logits of a chunk: the drafter's; DSpark's before and after correction, and the target's; Domino's two.
_LOGITS: Mapping[type, int] = {DFlashRecipe: 1, DSparkRecipe: 3, DominoRecipe: 2}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockMethod:
    """See `jspec_train.methods.protocol.TrainedMethod`."""

    recipe: BlockRecipe
    config: DFlashConfig

    @property
    def captured(self) -> tuple[str, ...]:
        """States that a batch's features hold: the drafter's, and for DSpark what the target's head reads."""
        return self.objective(1).captured

    @property
    def features(self) -> tuple[str, ...]:
        """Those that the drafter reads."""
        return layer_outputs(self.config.target_layer_ids)

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that are drafted; None = all."""
        return self.config.draft_vocab_size

    @property
    def frozen(self) -> frozenset[str]:
        """An embedding is a copy of a target's."""
        return frozenset({"embedding", "draft_ids"})

    def leaves(self, dtype: jnp.dtype) -> tuple[Leaf, ...]:
        """The drafter's arrays."""
        return dflash_leaves(self.config, dtype)

    def objective(self, total_steps: int) -> BlockObjective:
        """The loss."""
        return block_objective(self.recipe, self.config, total_steps)

    def held_out_objective(self, total_steps: int) -> BlockObjective:
        """The loss: nothing in it is for training only."""
        return self.objective(total_steps)

    def check_samples(self, source: SampleSource) -> None:
        """The mask token is in no text, and the anchor and a whole block of labels fit into some answer."""
        config = self.config
        longest, needed = look_at(source, config.mask_token_id), config.longest_draft + 1
        if longest < needed:
            raise ValueError(
                f"drafter.block_size: expected at most {longest - needed + config.block_size}, as the longest "
                f"stretch of supervised tokens in the first {min(len(source), LOOKED_AT)} samples is {longest}, got "
                f"{config.block_size}; its last rows would never be trained: lower it"
            )

    def fresh(
        self, key: Array, draft_ids: Int[Array, "draft_vocabulary"] | None, loaded: LoadedTarget
    ) -> Params:
        """Random leaves, or as much of the target as fits in the backbone."""
        fresh = init_dflash_params(self.config, key, jnp.float32, draft_ids=draft_ids)
        if self.recipe.training.start == "fresh":
            return fresh
        return init_from_target(self.config, fresh, loaded.target.config, loaded.params)

    def warm(self, folder: Path, key: Array) -> Params:
        """Leaves of a drafter of the same sizes; for DFlash 2 also of a DFlash drafter without its additions."""
        before = load_dflash(folder, jnp.float32)
        held = before.drafter.config
        if held.method == "DFlash" and self.config.method == "DFlash 2":
            return upgrade_dflash_params(held, before.params, self.config, key, jnp.float32)
        if held != self.config:
            raise other_sizes(self.config, held, folder)
        return before.params

    def drafter(self, draft_length: int | None) -> Drafter:
        """Decodes with such weights."""
        return drafter_of(self.config, draft_length)

    def save(self, folder: Path, params: Params, files: Mapping[str, str]) -> None:
        """In the layout of SGLang and SpecForge."""
        save_dflash(folder, self.config, params, files=files)

    def plan(self, rows: int, longest: int) -> Mapping[str, Any]:
        """Anchors, and the logits of a chunk of blocks."""
        part, config = self.recipe.objective, self.config
        anchors, drafts = min(part.num_anchors, longest - 1), config.longest_draft
        chunk = min(part.chunk_blocks, rows * anchors) * drafts * _LOGITS[type(self.recipe)]
        return {
            "predicted": f"{anchors} anchors a row x {drafts} draft tokens: {anchors * drafts:,} predicted tokens a "
            "row at most",
            "chunk_bytes": chunk * (config.draft_vocab_size or config.decoder.vocab_size) * 4,
        }


def block_objective(recipe: BlockRecipe, config: DFlashConfig, total_steps: int) -> BlockObjective:
    """The loss that a recipe describes.

    Args:
      recipe: of one of these methods.
      config: of its drafter.
      total_steps: updates of the whole run.
    """
    part = recipe.objective
    shared: dict[str, Any] = {
        "config": config,
        "num_anchors": part.num_anchors,
        "gamma": part.gamma,
        "chunk_blocks": part.chunk_blocks,
        "recompute": recipe.training.gradient_checkpointing,
    }
    match recipe:
        case DFlashRecipe(objective=part):
            return DFlashObjective(
                loss=part.loss,
                weighting=part.weighting,
                dpace_alpha=part.dpace_alpha,
                kl_scale=part.kl_scale,
                kl_decay=part.kl_decay,
                selector=SelectorTerm(
                    alpha=part.selector_alpha,
                    warmup_ratio=part.selector_warmup_ratio,
                    ramp_ratio=part.selector_ramp_ratio,
                    stop_gradient=part.selector_stop_gradient,
                ),
                total_steps=total_steps,
                data_axis="data",
                **shared,
            )
        case DSparkRecipe(objective=part):
            return DSparkObjective(
                loss=part.loss,
                cross_entropy_weight=part.cross_entropy_weight,
                l1_weight=part.l1_weight,
                confidence_weight=part.confidence_weight,
                dpard_alpha=part.dpard_alpha,
                **shared,
            )
        case DominoRecipe(objective=part):
            return DominoObjective(
                base_start=part.base_start, base_ratio=part.base_ratio, total_steps=total_steps, **shared
            )
