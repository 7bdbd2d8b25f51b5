"""DFlash and DFlash 2 in the training program."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.checkpoints.dflash import load_dflash
from jspec.checkpoints.dflash_save import save_dflash
from jspec.checkpoints.target import LoadedTarget
from jspec.drafters.dflash import dflash, dflash_leaves
from jspec.drafters.dflash2 import dflash2
from jspec.drafters.dflash_init import init_dflash_params, init_from_target, upgrade_dflash_params
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.protocol import Drafter
from jspec.net import Leaf, Params
from jspec.objectives.dflash import DFlashObjective, SelectorTerm
from jspec_train.drafters import other_sizes
from jspec_train.methods.samples import LOOKED_AT, look_at
from jspec_train.recipe import DFlashRecipe
from jspec_train.samples import SampleSource


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashMethod:
    """See `jspec_train.methods.protocol.TrainedMethod`."""

    recipe: DFlashRecipe
    config: DFlashConfig
    frozen: frozenset[str] = frozenset({"embedding", "draft_ids"})

    @property
    def captured(self) -> tuple[str, ...]:
        """States that a batch's features hold, in order."""
        return self.objective(1).captured

    @property
    def features(self) -> tuple[str, ...]:
        """All of them: labels are the tokens."""
        return self.captured

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that are drafted; None = all."""
        return self.config.draft_vocab_size

    def leaves(self, dtype: jnp.dtype) -> tuple[Leaf, ...]:
        """The drafter's arrays."""
        return dflash_leaves(self.config, dtype)

    def objective(self, total_steps: int) -> DFlashObjective:
        """The loss."""
        part = self.recipe.objective
        return DFlashObjective(
            config=self.config,
            num_anchors=part.num_anchors,
            loss=part.loss,
            weighting=part.weighting,
            gamma=part.gamma,
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
            chunk_blocks=part.chunk_blocks,
            recompute=self.recipe.training.gradient_checkpointing,
            data_axis="data",
        )

    def held_out_objective(self, total_steps: int) -> DFlashObjective:
        """The loss: nothing in it is for training only."""
        return self.objective(total_steps)

    def check_samples(self, source: SampleSource) -> None:
        """The mask token is in no text, and a whole block fits into some answer."""
        longest = look_at(source, self.config.mask_token_id)
        if longest < self.config.block_size:
            raise ValueError(
                f"drafter.block_size: expected at most {longest}, the longest stretch of supervised tokens in the first "
                f"{min(len(source), LOOKED_AT)} samples, got {self.config.block_size}; its last rows would never be "
                "trained: lower it"
            )

    def fresh(
        self, key: Array, draft_ids: Int[Array, "draft_vocabulary"] | None, loaded: LoadedTarget
    ) -> Params:
        """Random leaves, or as much of the target as fits."""
        fresh = init_dflash_params(self.config, key, jnp.float32, draft_ids=draft_ids)
        if self.recipe.training.start == "fresh":
            return fresh
        return init_from_target(self.config, fresh, loaded.target.config, loaded.params)

    def warm(self, folder: Path, key: Array) -> Params:
        """Leaves of a DFlash drafter; for DFlash 2 also of one without its additions."""
        before = load_dflash(folder, jnp.float32)
        held = before.drafter.config
        if held.selector is None and self.config.selector is not None:
            return upgrade_dflash_params(held, before.params, self.config, key, jnp.float32)
        if held != self.config:
            raise other_sizes(self.config, held, folder)
        return before.params

    def drafter(self, draft_length: int | None) -> Drafter:
        """Decodes with such weights."""
        make = dflash if self.config.selector is None else dflash2
        return make(self.config, draft_length=draft_length)

    def save(self, folder: Path, params: Params, files: Mapping[str, str]) -> None:
        """In the layout of SGLang and SpecForge."""
        save_dflash(folder, self.config, params, files=files)

    def plan(self, rows: int, longest: int) -> Mapping[str, Any]:
        """Anchors, and the logits of a chunk of blocks."""
        part, config = self.recipe.objective, self.config
        anchors = min(part.num_anchors, longest - 1)
        chunk = min(part.chunk_blocks, rows * anchors) * (config.block_size - 1)
        return {
            "predicted": f"{anchors} anchors a row x {config.block_size}: "
            f"{anchors * (config.block_size - 1):,} predicted tokens a row at most",
            "chunk_bytes": chunk * (config.draft_vocab_size or config.decoder.vocab_size) * 4,
        }
