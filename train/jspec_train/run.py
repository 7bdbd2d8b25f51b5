"""From a recipe to a run that is ready to start: everything is opened and checked, nothing is trained."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jspec.capture import Capture
from jspec.checkpoints.dflash import load_dflash
from jspec.checkpoints.target import LoadedTarget, load_target
from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash_init import init_dflash_params, init_from_target, upgrade_dflash_params
from jspec.drafters.dflash_net import DFlashConfig
from jspec.features import layer_outputs
from jspec.loading import resolve
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.dflash import DFlashObjective, SelectorTerm
from jspec.objectives.frozen import DraftTables, FrozenTarget, Tables, draft_tables
from jspec.sharding import make_mesh
from jspec.text.tokenizer import Tokenizer, load_tokenizer
from jspec_train.data.batches import batches
from jspec_train.data.supervision import longest_run
from jspec_train.drafters import draft_vocabulary, drafter_config, mask_token
from jspec_train.feature_store import weights_fingerprint
from jspec_train.loop import BatchIterator
from jspec_train.optimizer import adamw, learning_rate_schedule
from jspec_train.recipe import Recipe
from jspec_train.samples import SampleSource, open_samples
from jspec_train.step import FROZEN, Trainer

_LOOKED_AT = 1000  # samples that are read before the start


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a recipe comes to on this machine."""

    recipe: Recipe
    loaded: LoadedTarget
    tokenizer: Tokenizer
    config: DFlashConfig
    trainer: Trainer
    target: Tables  # on the mesh
    start_params: Params  # leaves before the first update
    source: SampleSource
    validation: SampleSource | None
    max_length: int
    total_steps: int

    @property
    def frozen(self) -> Params:
        """Leaves that are not trained."""
        leaves = self.trainer.leaves
        return tuple(p for p, leaf in zip(self.start_params, leaves, strict=True) if leaf.path in FROZEN)

    @property
    def data_identity(self) -> Mapping[str, Any]:
        """What must be the same when the run is resumed."""
        return {
            "content": self.source.counts.content,
            "samples": self.source.counts.samples,
            "target": self.loaded.target.identity,
            "target_weights": weights_fingerprint(self.loaded.params),
        }

    def batches(self, source: SampleSource, *, epochs: int | None, shuffle: bool = True) -> BatchIterator:
        """Batches of a source in the shape that the run trains on."""
        data, training = self.recipe.data, self.recipe.training
        return batches(
            source,
            batch_size=training.batch_size,
            max_length=self.max_length,
            seed=training.seed,
            epochs=epochs,
            bucket=min(data.bucket, self.max_length),
            pack=data.pack,
            shuffle=shuffle,
            drop_last=shuffle,
        )


def open_run(recipe: Recipe, *, progress: Callable[[str], None] = lambda _: None) -> Run:
    """Opens data, target and drafter of a recipe, and checks that they belong together.

    Raises:
      FileNotFoundError, ValueError: naming the setting and what to change.
    """
    progress("reading the data")
    source = open_samples(recipe.data.train)
    validation = None if recipe.data.validation is None else open_samples(recipe.data.validation)
    if validation is None and recipe.evaluation.prompts:
        raise ValueError(
            "data.validation: expected a folder, as evaluation.prompts asks to decode held-out prompts, got None; "
            "prepare with --validation, or set evaluation.prompts to 0"
        )
    progress("loading the target")
    path = resolve(recipe.target)
    dtype = jnp.dtype(recipe.training.dtype)
    loaded = load_target(path, dtype=dtype)
    tokenizer = load_tokenizer(path)
    for name, one in (("data.train", source), ("data.validation", validation)):
        if one is not None:
            _check_data(name, one, tokenizer, loaded)
    mask_token_id = mask_token(recipe.drafter.mask_token_id, tokenizer, loaded.target.vocab_size)
    config = drafter_config(recipe.drafter, loaded.target.config, mask_token_id)
    names = layer_outputs(config.target_layer_ids)
    for name, one in (("data.train", source), ("data.validation", validation)):
        if one is not None and one.header.features is not None:
            _check_features(name, one, names, loaded)
    progress("looking at samples")
    _look_at(source, config)
    mesh = make_mesh(tensor=1, data=len(jax.devices()))
    devices = mesh.shape["data"]
    if recipe.training.batch_size % devices:
        raise ValueError(
            f"training.batch_size: expected a multiple of the {devices} devices, got {recipe.training.batch_size}; "
            "round it"
        )
    capture = Capture(target=loaded.target, names=names, dtype=_feature_dtype(dtype))

    def fill(target: Tables, batch: TrainBatch) -> TrainBatch:
        if batch.features.shape[2]:
            return batch
        frozen = target.tables if isinstance(target, DraftTables) else target
        assert isinstance(frozen, FrozenTarget)
        return capture.batch(frozen.params, batch, mesh)

    total_steps = _total_steps(recipe, source)
    target_params = jax.device_put(loaded.params, NamedSharding(mesh, PartitionSpec()))
    loaded = dataclasses.replace(loaded, params=target_params)
    progress("making the drafter")
    leaves = dflash_leaves(config, dtype)
    target = FrozenTarget(params=target_params, target=loaded.target)
    start_params = _start_params(recipe, config, source, loaded)
    tables: Tables = target
    if config.draft_vocab_size is not None:
        (draft_ids,) = (p for p, leaf in zip(start_params, leaves, strict=True) if leaf.path == "draft_ids")
        tables = draft_tables(target, loaded.target.hidden_size, draft_ids, loaded.target.vocab_size)
    return Run(
        recipe=recipe,
        loaded=loaded,
        tokenizer=tokenizer,
        config=config,
        trainer=Trainer(
            objective=_objective(recipe, config, total_steps),
            optimizer=_optimizer(recipe, total_steps),
            leaves=leaves,
            mesh=mesh,
            seed=recipe.training.seed,
            capture=fill,
        ),
        target=tables,
        start_params=start_params,
        source=source,
        validation=validation,
        max_length=recipe.data.max_length or source.counts.longest,
        total_steps=total_steps,
    )


def _check_data(name: str, source: SampleSource, tokenizer: Tokenizer, loaded: LoadedTarget) -> None:
    if source.header.tokenizer != tokenizer.identity:
        raise ValueError(
            f"{name}: expected samples of the target's tokenizer ({tokenizer.identity[:12]}), got samples of "
            f"({source.header.tokenizer[:12]}) in {source.folder}; prepare them with this target"
        )
    if source.counts.longest > loaded.target.max_context:
        raise ValueError(
            f"{name}: expected samples of at most {loaded.target.max_context} tokens, got one of "
            f"{source.counts.longest}; prepare them with a smaller max_length"
        )


def _check_features(name: str, source: SampleSource, names: Sequence[str], loaded: LoadedTarget) -> None:
    """The stored features are what this drafter would read of this very target."""
    contract = source.header.features
    assert contract is not None
    contract.check(loaded.target)
    if contract.names != tuple(names):
        raise ValueError(
            f"{name}: expected features {list(names)} (drafter.target_layer_ids), got {list(contract.names)} in "
            f"{source.folder}; capture them again, or train on those layers"
        )


def _look_at(source: SampleSource, config: DFlashConfig) -> None:
    """Finds data that cannot be meant, before hours are spent on it."""
    count = min(len(source), _LOOKED_AT)
    longest = 0
    for index in range(count):
        sample = source[index]
        longest = max(longest, longest_run(sample.loss_mask))
        if np.any(sample.ids == config.mask_token_id):
            raise ValueError(
                f"drafter.mask_token_id: expected an id that no text has, got {config.mask_token_id}, which is in sample "
                f"{sample.id}; choose a token that is never used"
            )
    if longest < config.block_size:
        raise ValueError(
            f"drafter.block_size: expected at most {longest}, the longest stretch of supervised tokens in the first "
            f"{count} samples, got {config.block_size}; its last rows would never be trained: lower it"
        )


def _total_steps(recipe: Recipe, source: SampleSource) -> int:
    training = recipe.training
    if recipe.data.pack:
        if training.max_steps is None:
            raise ValueError(
                "training.max_steps: expected a number with data.pack, got None; how many rows the documents make "
                "is not known before they are packed"
            )
        return training.max_steps
    steps = training.epochs * len(source) // (training.batch_size * training.accumulation)
    if training.max_steps is not None:
        return training.max_steps
    if not steps:
        raise ValueError(
            f"training.batch_size: expected at most {training.epochs * len(source)} (epochs x samples) with "
            f"accumulation, got {training.batch_size} x {training.accumulation}; lower it"
        )
    return steps


def _objective(recipe: Recipe, config: DFlashConfig, total_steps: int) -> DFlashObjective:
    part = recipe.objective
    return DFlashObjective(
        config=config,
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
        recompute=recipe.training.gradient_checkpointing,
        data_axis="data",
    )


def _optimizer(recipe: Recipe, total_steps: int) -> Any:
    part = recipe.optimizer
    schedule = learning_rate_schedule(
        part.schedule,
        peak=part.learning_rate,
        total_steps=total_steps,
        warmup_steps=int(part.warmup_ratio * total_steps),
    )
    return adamw(
        schedule, max_grad_norm=part.max_grad_norm, weight_decay=part.weight_decay, b1=part.b1, b2=part.b2
    )


def _start_params(recipe: Recipe, config: DFlashConfig, source: SampleSource, loaded: LoadedTarget) -> Params:
    """Float32 leaves: fresh, or those of `training.warm_start`."""
    key = jax.random.fold_in(jax.random.key(recipe.training.seed), 2**31)
    folder = recipe.training.warm_start
    if folder is None:
        size, vocab_size = config.draft_vocab_size, config.decoder.vocab_size
        draft_ids = None if size is None else jnp.asarray(draft_vocabulary(source, size, vocab_size))
        fresh = init_dflash_params(config, key, jnp.float32, draft_ids=draft_ids)
        if recipe.training.start == "fresh":
            return fresh
        return init_from_target(config, fresh, loaded.target.config, loaded.params)
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"training.warm_start: expected a drafter's folder, got {folder!r}, which does not exist"
        )
    before = load_dflash(folder, jnp.float32)
    held = before.drafter.config
    if held.selector is None and config.selector is not None:
        return upgrade_dflash_params(held, before.params, config, key, jnp.float32)
    if held != config:
        raise ValueError(
            f"training.warm_start: expected a drafter ({config.identity}), got ({held.identity}) in {folder}; "
            "use its sizes, or start fresh"
        )
    return before.params


def _feature_dtype(dtype: jnp.dtype) -> str:
    return "bfloat16" if dtype == jnp.bfloat16 else "float32"
