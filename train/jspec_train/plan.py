"""What a run would do, without doing it."""

import itertools
import shutil
from pathlib import Path

import jax
import numpy as np
from rich.table import Table

from jspec_train.run import Run

_SHOWN_BATCHES = 3


def plan_table(run: Run) -> Table:
    """Shapes, parameters, memory, storage and steps of a run."""
    recipe, trainer = run.recipe, run.trainer
    sizes = {leaf.path: int(np.prod(leaf.shape)) for leaf in trainer.leaves}
    trained = sum(size for path, size in sizes.items() if path not in trainer.frozen)
    devices = trainer.mesh.shape["data"]
    training = recipe.training
    rows = training.batch_size // devices
    method = run.method.plan(rows, run.max_length)
    target_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(run.loaded.params))
    state_bytes = 3 * 4 * trained  # masters and two moments
    width = len(run.method.captured) * run.loaded.target.hidden_size
    table = Table(title=f"plan of {recipe.output}", show_header=False)
    free = shutil.disk_usage(_existing(Path(recipe.output))).free
    lines = {
        "method": f"{recipe.method}: {run.method.config.identity}",
        "target": run.loaded.target.identity,
        "parameters": f"{trained:,} trained, {sum(sizes.values()) - trained:,} frozen copies",
        "data": f"{len(run.source):,} samples, {run.source.counts.tokens:,} tokens, "
        f"{run.source.counts.supervised_tokens:,} supervised, features "
        + ("stored" if run.source.header.features is not None else "captured while training"),
        "updates": f"{run.total_steps:,} of {training.batch_size} x {training.accumulation} rows "
        f"({run.total_steps * training.batch_size * training.accumulation / len(run.source):.2f} epochs)",
        "devices": f"{devices}, {rows} rows each per micro-batch",
        "a micro-batch": f"up to {training.batch_size} x {run.max_length} tokens, features of {width}, "
        f"{method['predicted']}",
        "memory per device": f"target {target_bytes / 1e9:.2f} GB, state {state_bytes / devices / 1e9:.3f} GB, "
        f"features {rows * run.max_length * width * 4 / 1e9:.3f} GB, "
        f"logits of a chunk {method['chunk_bytes'] / 1e9:.2f} GB",
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
