"""DSpark and Domino in the training program."""

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
from jspec.drafters.dflash_init import init_dflash_params, init_from_target
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.protocol import Drafter
from jspec.features import layer_outputs
from jspec.net import Leaf, Params
from jspec.objectives.domino import DominoObjective
from jspec.objectives.dspark import DSparkObjective
from jspec_train.drafters import other_sizes
from jspec_train.methods.samples import LOOKED_AT, look_at
from jspec_train.recipe import DominoRecipe, DSparkRecipe
from jspec_train.samples import SampleSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class SequentialMethod:
    """See `jspec_train.methods.protocol.TrainedMethod`."""

    recipe: DSparkRecipe | DominoRecipe
    config: DFlashConfig
    frozen: frozenset[str] = frozenset({"embedding", "draft_ids"})

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

    def leaves(self, dtype: jnp.dtype) -> tuple[Leaf, ...]:
        """The drafter's arrays."""
        return dflash_leaves(self.config, dtype)

    def objective(self, total_steps: int) -> DSparkObjective | DominoObjective:
        """The loss."""
        recompute = self.recipe.training.gradient_checkpointing
        if isinstance(self.recipe, DSparkRecipe):
            part = self.recipe.objective
            return DSparkObjective(
                config=self.config,
                num_anchors=part.num_anchors,
                loss=part.loss,
                gamma=part.gamma,
                cross_entropy_weight=part.cross_entropy_weight,
                l1_weight=part.l1_weight,
                confidence_weight=part.confidence_weight,
                dpard_alpha=part.dpard_alpha,
                chunk_blocks=part.chunk_blocks,
                recompute=recompute,
            )
        part = self.recipe.objective
        return DominoObjective(
            config=self.config,
            num_anchors=part.num_anchors,
            gamma=part.gamma,
            base_start=part.base_start,
            base_ratio=part.base_ratio,
            total_steps=total_steps,
            chunk_blocks=part.chunk_blocks,
            recompute=recompute,
        )

    def held_out_objective(self, total_steps: int) -> DSparkObjective | DominoObjective:
        """The loss: nothing in it is for training only."""
        return self.objective(total_steps)

    def check_samples(self, source: SampleSource) -> None:
        """The mask token is in no text, and the anchor and a whole block of labels fit into some answer."""
        longest, needed = look_at(source, self.config.mask_token_id), self.config.longest_draft + 1
        if longest < needed:
            raise ValueError(
                f"drafter.block_size: expected at most {longest - needed + self.config.block_size}, as the longest "
                f"stretch of supervised tokens in the first {min(len(source), LOOKED_AT)} samples is {longest}, got "
                f"{self.config.block_size}; its last rows would never be trained: lower it"
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
        """Leaves of a drafter of the same sizes."""
        before = load_dflash(folder, jnp.float32)
        if before.drafter.config != self.config:
            raise other_sizes(self.config, before.drafter.config, folder)
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
        anchors = min(part.num_anchors, longest - 1)
        chunk = min(part.chunk_blocks, rows * anchors) * config.longest_draft
        tables = 3 if isinstance(self.recipe, DSparkRecipe) else 2  # base or corrected, the target's
        return {
            "predicted": f"{anchors} anchors a row x {config.longest_draft}: "
            f"{anchors * config.longest_draft:,} predicted tokens a row at most",
            "chunk_bytes": chunk * (config.draft_vocab_size or config.decoder.vocab_size) * 4 * tables,
        }
