"""EAGLE, EAGLE-3 and P-EAGLE in the training program."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jspec.checkpoints.eagle import load_eagle
from jspec.checkpoints.eagle_save import check_savable, save_eagle
from jspec.checkpoints.target import LoadedTarget
from jspec.drafters.eagle import eagle
from jspec.drafters.eagle_from_target import eagle_from_target
from jspec.drafters.eagle_init import eagle_config_for, init_eagle_params
from jspec.drafters.eagle_net import EagleConfig, eagle_leaves
from jspec.drafters.head_columns import head_columns
from jspec.drafters.protocol import Drafter
from jspec.net import Leaf, Params
from jspec.objectives.eagle import EagleObjective
from jspec.objectives.eagle3 import Eagle3Objective
from jspec.objectives.frozen import FrozenTarget
from jspec.objectives.peagle import PEagleObjective
from jspec.targets.config import DecoderConfig
from jspec_train.drafters import other_sizes
from jspec_train.methods.samples import LOOKED_AT, look_at
from jspec_train.recipe import Eagle3Recipe, EagleRecipe, PEagleRecipe
from jspec_train.samples import SampleSource

AnyObjective = EagleObjective | Eagle3Objective | PEagleObjective


@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleMethod:
    """See `jspec_train.methods.protocol.TrainedMethod`."""

    recipe: EagleRecipe | Eagle3Recipe | PEagleRecipe
    config: EagleConfig

    @property
    def captured(self) -> tuple[str, ...]:
        """States that a batch's features hold: the drafter's, and what the target's head reads."""
        return self.objective(1).captured

    @property
    def features(self) -> tuple[str, ...]:
        """Those that the drafter reads."""
        return self.config.features

    @property
    def draft_vocab_size(self) -> int | None:
        """Ids that are drafted; None = all."""
        return self.config.draft_vocab_size

    @property
    def frozen(self) -> frozenset[str]:
        """An embedding of its own is trained: it has another width than the target's, or is P-EAGLE's."""
        return frozenset({"draft_ids"})

    def leaves(self, dtype: jnp.dtype) -> tuple[Leaf, ...]:
        """The drafter's arrays."""
        return eagle_leaves(self.config, dtype)

    def objective(self, total_steps: int) -> AnyObjective:
        """The loss."""
        recipe, config = self.recipe, self.config
        if isinstance(recipe, EagleRecipe):
            part = recipe.objective
            return EagleObjective(
                config=config,
                feature_weight=part.feature_weight,
                token_weight=part.token_weight,
                noise=part.noise,
                noise_width=part.noise_width,
                chunk=part.chunk,
            )
        if isinstance(recipe, PEagleRecipe):
            part = recipe.objective
            return PEagleObjective(
                config=config, depths=part.depths, ratio=part.ratio, least=part.least, chunk=part.chunk
            )
        part = recipe.objective
        return Eagle3Objective(
            config=config,
            depths=part.depths,
            decay=part.decay,
            loss=part.loss,
            kl_scale=part.kl_scale,
            kl_decay=part.kl_decay,
            normaliser=part.normaliser,
            chunk=part.chunk,
            data_axis="data",
        )

    def held_out_objective(self, total_steps: int) -> AnyObjective:
        """The loss without input noise."""
        objective = self.objective(total_steps)
        return (
            dataclasses.replace(objective, noise="none")
            if isinstance(objective, EagleObjective)
            else objective
        )

    def check_samples(self, source: SampleSource) -> None:
        """P-EAGLE's mask token is in no text, and every depth finds something to learn.

        P-EAGLE's deeper rows follow supervised ones, so that an answer needs a token for each depth. EAGLE-3 is
        rolled out of the prompt as well: there, the text has to be long enough.
        """
        longest = look_at(source, self.config.mask_token_id)
        if isinstance(self.recipe, EagleRecipe):
            return
        if isinstance(self.recipe, Eagle3Recipe):
            most = source.counts.longest - 1
            told = f"one less than the tokens of the longest sample ({source.counts.longest})"
        else:
            most = longest
            told = (
                f"the longest stretch of supervised tokens in the first {min(len(source), LOOKED_AT)} samples"
            )
        depths = self.recipe.objective.depths
        if depths > most:
            raise ValueError(
                f"objective.depths: expected at most {most}, {told}, got {depths}; the last depths would never be "
                "trained: lower it"
            )

    def fresh(
        self, key: Array, draft_ids: Int[Array, "draft_vocabulary"] | None, loaded: LoadedTarget
    ) -> Params:
        """Random leaves, or as much of the target as fits."""
        config, target = self.config, FrozenTarget(params=loaded.params, target=loaded.target)
        embedding = None
        if config.own_embedding and config.decoder.hidden_size == loaded.target.hidden_size:
            embedding = target.embed(jnp.arange(loaded.target.vocab_size)).astype(jnp.float32)
        fresh = init_eagle_params(config, key, jnp.float32, embedding=embedding, draft_ids=draft_ids)
        if self.recipe.training.start == "fresh":
            return fresh
        head = None
        if config.own_head:
            ids = jnp.arange(loaded.target.vocab_size) if draft_ids is None else draft_ids
            head = head_columns(target.logits, loaded.target.hidden_size, ids)
        return eagle_from_target(config, fresh, loaded.target.config, loaded.params, head)

    def warm(self, folder: Path, key: Array) -> Params:
        """Leaves of a drafter of the same sizes."""
        before = load_eagle(folder, jnp.float32)
        if before.drafter.config != self.config:
            raise other_sizes(self.config, before.drafter.config, folder)
        return before.params

    def drafter(self, draft_length: int | None) -> Drafter:
        """Decodes a chain with such weights."""
        return eagle(self.config, draft_length=draft_length)

    def save(self, folder: Path, params: Params, files: Mapping[str, str]) -> None:
        """In the layout that most programs read of such a drafter."""
        save_eagle(folder, self.config, params, files=files)

    def plan(self, rows: int, longest: int) -> Mapping[str, Any]:
        """Depths, and the logits of a chunk of rows."""
        objective, config = self.objective(1), self.config
        drafted = config.draft_vocab_size or config.decoder.vocab_size
        if isinstance(objective, Eagle3Objective):
            places = min(objective.chunk, longest) * rows
            said = f"every supervised token rolled out {objective.depths} times"
        elif isinstance(objective, PEagleObjective):
            places, said = (
                objective.chunk,
                f"every token, and samples of it at depths 1 to {objective.depths - 1}",
            )
        else:
            places, said = objective.chunk, "every supervised token"
        return {"predicted": said, "chunk_bytes": places * drafted * 4}


def eagle_method(
    recipe: EagleRecipe | Eagle3Recipe | PEagleRecipe, target: DecoderConfig, mask_token_id: int | None
) -> EagleMethod:
    """The drafter of a recipe for a target.

    Args:
      recipe: of one of these methods.
      target: reads the drafts.
      mask_token_id: of P-EAGLE.

    Raises:
      ValueError: layers that the target does not have, choices that do not go together, or that no file can state.
    """
    part = recipe.drafter
    sizes: dict[str, Any] = {
        "num_layers": part.num_layers,
        "intermediate_size": part.intermediate_size,
        "num_heads": part.num_heads,
        "num_kv_heads": part.num_kv_heads,
        "head_size": part.head_size,
        "window": part.window,
        "layer_kinds": part.layer_kinds,
    }
    if isinstance(recipe, EagleRecipe):
        config = eagle_config_for(target, kind="eagle", fc_bias=recipe.drafter.fc_bias, **sizes)
        check_savable(config)
        return EagleMethod(recipe=recipe, config=config)
    part = recipe.drafter
    hidden_size = part.hidden_size or target.hidden_size
    other_width = hidden_size != target.hidden_size
    if other_width and not part.own_head:
        raise ValueError(
            f"drafter.own_head: expected true for a drafter of width {hidden_size}, got false; the target's head reads "
            f"{target.hidden_size}"
        )
    config = eagle_config_for(
        target,
        kind="eagle3",
        target_layer_ids=part.target_layer_ids,
        own_head=part.own_head,
        own_embedding=other_width or isinstance(recipe, PEagleRecipe),
        feature_norms=part.feature_norms,
        norm_before_fc=part.norm_before_fc,
        head_reads_norm=part.head_reads_norm,
        feeds_back_norm=part.feeds_back_norm,
        norm_before_residual=part.norm_before_residual,
        query_key_norm=part.query_key_norm,
        hidden_size=hidden_size,
        mask_token_id=mask_token_id,
        draft_vocab_size=part.vocabulary,
        **sizes,
    )
    check_savable(config)
    return EagleMethod(recipe=recipe, config=config)
