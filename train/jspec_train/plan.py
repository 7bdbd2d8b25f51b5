"""What a run would do, without doing it."""

import itertools
import shutil
from pathlib import Path

import jax
import numpy as np
from rich.table import Table

from jspec_train.run import Run
from jspec_train.step import FROZEN

_SHOWN_BATCHES = 3


def plan_table(run: Run) -> Table:
    """Shapes, parameters, memory, storage and steps of a run."""
    recipe, trainer = run.recipe, run.trainer
    sizes = {leaf.path: int(np.prod(leaf.shape)) for leaf in trainer.leaves}
    trained = sum(size for path, size in sizes.items() if path not in FROZEN)
    devices = trainer.mesh.shape["data"]
    training, objective = recipe.training, recipe.objective
    rows = training.batch_size // devices
    anchors = min(objective.num_anchors, run.max_length - 1)
    chunk = min(objective.chunk_blocks, rows * anchors) * (run.config.block_size - 1)
    target_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(run.loaded.params))
    state_bytes = 3 * 4 * trained  # masters and two moments
    width = len(run.config.target_layer_ids) * run.config.target_hidden_size
    table = Table(title=f"plan of {recipe.output}", show_header=False)
    free = shutil.disk_usage(_existing(Path(recipe.output))).free
    lines = {
        "method": f"{recipe.method}: {run.config.identity}",
        "target": run.loaded.target.identity,
        "parameters": f"{trained:,} trained, {sum(sizes.values()) - trained:,} frozen copies",
        "data": f"{len(run.source):,} samples, {run.source.counts.tokens:,} tokens, "
        f"{run.source.counts.supervised_tokens:,} supervised, features "
        + ("stored" if run.source.header.features is not None else "captured while training"),
        "updates": f"{run.total_steps:,} of {training.batch_size} x {training.accumulation} rows "
        f"({run.total_steps * training.batch_size * training.accumulation / len(run.source):.2f} epochs)",
        "devices": f"{devices}, {rows} rows each per micro-batch",
        "a micro-batch": f"up to {training.batch_size} x {run.max_length} tokens, features of {width}, "
        f"{anchors} anchors a row x {run.config.block_size} = "
        f"{training.batch_size * anchors * (run.config.block_size - 1):,} predicted tokens at most",
        "memory per device": f"target {target_bytes / 1e9:.2f} GB, state {state_bytes / devices / 1e9:.3f} GB, "
        f"features {rows * run.max_length * width * 4 / 1e9:.3f} GB, "
        f"logits of a chunk {chunk * run.config.decoder.vocab_size * 4 / 1e9:.2f} GB",
        "storage": f"{(recipe.checkpoints.keep + 1) * state_bytes / 1e9:.2f} GB of checkpoints, {free / 1e9:.1f} GB free",
    }
    for name, text in lines.items():
        table.add_row(name, text)
    batches = run.batches(run.source, epochs=None)
    for number, batch in enumerate(itertools.islice(batches, _SHOWN_BATCHES)):
        names = [name for row in batch["sample_ids"] for name in ([row] if isinstance(row, str) else row)]
        table.add_row(f"batch {number}", f"{list(batch['ids'].shape)}: {', '.join(map(str, names))}")
    return table


def _existing(path: Path) -> Path:
    return next(place for place in (path, *path.absolute().parents) if place.exists())
