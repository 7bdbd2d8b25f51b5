"""From a recipe to a run that is ready to start: everything is opened and checked, nothing is trained."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jspec.capture import Capture
from jspec.checkpoints.draft_vocabulary import DraftVocabulary, read_draft_vocabulary
from jspec.checkpoints.target import LoadedTarget, load_target
from jspec.loading import resolve
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.frozen import DraftTables, FrozenTarget, Tables, draft_tables
from jspec.sharding import make_mesh
from jspec.text.tokenizer import Tokenizer, load_tokenizer
from jspec_train.data.batches import batches
from jspec_train.feature_store import weights_fingerprint
from jspec_train.loop import BatchIterator
from jspec_train.methods.choose import method_of
from jspec_train.methods.protocol import TrainedMethod
from jspec_train.optimizer import adamw, learning_rate_schedule
from jspec_train.recipe import Recipe
from jspec_train.samples import SampleSource, open_samples
from jspec_train.step import Trainer
from jspec_train.vocabulary import draft_vocabulary


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """What a recipe comes to on this machine."""

    recipe: Recipe
    loaded: LoadedTarget
    tokenizer: Tokenizer
    method: TrainedMethod
    vocabulary: DraftVocabulary | None  # of a drafter that drafts a part of the ids
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
        leaves, frozen = self.trainer.leaves, self.trainer.frozen
        return tuple(p for p, leaf in zip(self.start_params, leaves, strict=True) if leaf.path in frozen)

    @property
    def data_identity(self) -> Mapping[str, Any]:
        """What must be the same when the run is resumed."""
        return {
            "content": self.source.counts.content,
            "samples": self.source.counts.samples,
            "target": self.loaded.target.identity,
            "target_weights": weights_fingerprint(self.loaded.params),
            "draft_vocabulary": None if self.vocabulary is None else self.vocabulary.key,
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
    method = method_of(recipe, tokenizer, loaded.target.config)
    names = method.captured
    source = _with_states("data.train", source, names, loaded)
    if validation is not None:
        validation = _with_states("data.validation", validation, names, loaded)
    progress("looking at samples")
    method.check_samples(source)
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
    leaves = method.leaves(dtype)
    target = FrozenTarget(params=target_params, target=loaded.target)
    vocabulary = _vocabulary(recipe, method, source, loaded.target.vocab_size)
    start_params = _start_params(recipe, method, vocabulary, loaded)
    tables: Tables = target
    if method.draft_vocab_size is not None:
        (draft_ids,) = (p for p, leaf in zip(start_params, leaves, strict=True) if leaf.path == "draft_ids")
        tables = draft_tables(target, loaded.target.hidden_size, draft_ids, loaded.target.vocab_size)
    return Run(
        recipe=recipe,
        loaded=loaded,
        tokenizer=tokenizer,
        method=method,
        vocabulary=vocabulary,
        trainer=Trainer(
            objective=method.objective(total_steps),
            held_out=method.held_out_objective(total_steps),
            frozen=method.frozen,
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


def _with_states(name: str, source: SampleSource, names: Sequence[str], loaded: LoadedTarget) -> SampleSource:
    """The source with the states that are trained on, in their order, if it has stored ones of this very target."""
    contract = source.header.features
    if contract is None:
        return source
    contract.check(loaded.target)
    missing = [state for state in names if state not in contract.names]
    if missing:
        raise ValueError(
            f"{name}: expected features {list(names)}, got {list(contract.names)} without {missing[0]} in "
            f"{source.folder}; capture them again, or train on those layers"
        )
    return source.select(names)


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


def _vocabulary(
    recipe: Recipe, method: TrainedMethod, source: SampleSource, vocab_size: int
) -> DraftVocabulary | None:
    """What is drafted, and what it was counted on; None where all of the vocabulary is."""
    size, folder = method.draft_vocab_size, recipe.training.warm_start
    if size is None:
        return None
    if folder is None:
        return draft_vocabulary(source, size, vocab_size, Path(recipe.output))
    before = read_draft_vocabulary(Path(folder))
    if before is not None:
        before.check_tokenizer(source.header.tokenizer)
    return before


def _start_params(
    recipe: Recipe, method: TrainedMethod, vocabulary: DraftVocabulary | None, loaded: LoadedTarget
) -> Params:
    """Float32 leaves: fresh, or those of `training.warm_start`."""
    key = jax.random.fold_in(jax.random.key(recipe.training.seed), 2**31)
    folder = recipe.training.warm_start
    if folder is None:
        ids = None if vocabulary is None else jnp.asarray(vocabulary.ids, jnp.int32)
        return method.fresh(key, ids, loaded)
    if not Path(folder).is_dir():
        raise FileNotFoundError(
            f"training.warm_start: expected a drafter's folder, got {folder!r}, which does not exist"
        )
    return method.warm(Path(folder), key)


def _feature_dtype(dtype: jnp.dtype) -> str:
    return "bfloat16" if dtype == jnp.bfloat16 else "float32"
