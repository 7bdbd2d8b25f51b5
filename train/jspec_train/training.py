"""Starts, continues and ends a run: what `jspec train` does, as a function."""

import dataclasses
import itertools
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax.numpy as jnp

from jspec.checkpoints.draft_vocabulary import VOCABULARY_FILE
from jspec.decode import Method, Models
from jspec.engine import Engine
from jspec.features import CONTRACT_FILE, feature_contract
from jspec_train.checkpoints import Checkpoints
from jspec_train.decoding import HeldOutPrompt, decode_held_out, prompts_of, spread
from jspec_train.loop import HostBatch, Job, Outcome, Watcher, loss_evaluation, train
from jspec_train.run import Run
from jspec_train.step import TrainState
from jspec_train.vocabulary import keep_draft_vocabulary


def train_run(
    run: Run,
    *,
    resume: bool = False,
    watchers: Callable[[int], Sequence[Watcher]] = lambda done: (),
) -> Outcome:
    """Trains, evaluates and saves; the best drafter ends up in OUTPUT/best, ready to decode with.

    Args:
      run: from `open_run`.
      resume: continue the run in the recipe's output from its last checkpoint.
      watchers: called with the updates that are done already.

    Raises:
      ValueError, FloatingPointError: see `Checkpoints` and `jspec_train.loop.train`.
    """
    recipe, trainer = run.recipe, run.trainer
    checkpoints = Checkpoints(recipe.output, recipe, run.data_identity, resume=resume)
    if run.vocabulary is not None:
        keep_draft_vocabulary(run.vocabulary, Path(recipe.output))
    try:
        state = trainer.start(run.start_params)
        batches = run.batches(run.source, epochs=_epochs(run))
        restored = checkpoints.restore(state) if resume else None
        if restored is not None:
            state = restored.state
            batches.set_state(restored.data)
        job = Job(
            trainer=trainer,
            target=run.target,
            frozen=run.frozen,
            total_steps=run.total_steps,
            accumulation=recipe.training.accumulation,
            log_every=recipe.log_every,
            save_every=recipe.checkpoints.every,
            evaluate_every=recipe.evaluation.every,
            evaluate=None if run.validation is None else evaluation(run),
        )
        outcome = train(job, state, batches, checkpoints, watchers(int(state.step)))
        if not outcome.interrupted:
            export_best(run, checkpoints, Path(recipe.output) / "best")
        return outcome
    finally:
        checkpoints.close()


def evaluation(run: Run) -> Callable[[TrainState], Mapping[str, float]]:
    """A function from a state to held-out figures: the loss, and what real decoding accepts."""
    part, source = run.recipe.evaluation, run.validation
    assert source is not None
    held_out: list[HostBatch] = list(
        itertools.islice(run.batches(source, epochs=1, shuffle=False), part.loss_batches)
    )
    loss = loss_evaluation(run.trainer, run.frozen, run.target, held_out)
    prompts = prompts_of([source[i] for i in spread(len(source), part.prompts)])
    engine = engine_for(run, prompts, part.max_tokens, part.draft_length) if prompts else None

    def evaluate(state: TrainState) -> Mapping[str, float]:
        values = loss(state)
        if engine is None:
            return values
        engine.models = Models(target=engine.models.target, drafter=run.trainer.params(state, run.frozen))
        counters = decode_held_out(engine, prompts, part.max_tokens)
        for task, count in counters.items():
            if count.mean_commit_length is not None:
                name = "mean_commit_length" if task == "all" else f"mean_commit_length[{task}]"
                values[name] = count.mean_commit_length
        return values

    return evaluate


def engine_for(
    run: Run, prompts: Sequence[HeldOutPrompt], max_tokens: int, draft_length: int | None
) -> Engine:
    """An engine with the run's target and drafter, large enough for the prompts."""
    longest = max(len(prompt.ids) for prompt in prompts) + max_tokens
    params = run.trainer.params(run.trainer.start(run.start_params), run.frozen)
    return Engine(
        method=Method(target=run.loaded.target, drafter=run.method.drafter(draft_length)),
        models=Models(target=run.loaded.params, drafter=params),
        tokenizer=run.tokenizer,
        eos_ids=run.loaded.eos_ids or run.tokenizer.eos_ids,
        max_slots=4,
        max_context=min(-(-longest // 128) * 128, run.loaded.target.max_context),
        cache_dtype=jnp.dtype(run.recipe.training.dtype),
    )


def export_best(run: Run, checkpoints: Checkpoints, folder: Path) -> int | None:
    """Writes the best checkpoint's drafter as a Hugging Face folder; returns its step."""
    step = checkpoints.best_step()
    if step is None:
        return None
    restored = checkpoints.restore(run.trainer.start(run.start_params), step)
    assert restored is not None
    if folder.exists():  # of a run that was continued after it had ended
        shutil.rmtree(folder)
    contract = feature_contract(run.loaded.target, run.method.features, run.recipe.training.dtype)
    origin = {
        "recipe": run.recipe.model_dump(mode="json"),
        "data": dict(run.data_identity),
        "update": step,
        "figures": dict(restored.metrics),
    }
    files = {
        CONTRACT_FILE: json.dumps(dataclasses.asdict(contract), indent=1),
        "training.json": json.dumps(origin, indent=1),
    }
    if run.vocabulary is not None:
        files[VOCABULARY_FILE] = run.vocabulary.json()
    params = run.trainer.params(restored.state, run.frozen)
    run.method.save(folder, params, files)
    return step


def _epochs(run: Run) -> int | None:
    return None if run.recipe.training.max_steps is not None else run.recipe.training.epochs
