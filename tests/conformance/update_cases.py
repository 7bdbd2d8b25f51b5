"""Golden cases of several updates: learning rates, losses, gradient norms, masters and the weights at the end."""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conformance.block_records import leaves_of, numerator_and_grads, recorded_blocks, recorded_start
from conformance.eagle_records import compare_leaves, eagle3_objective, start_of, trainable
from conformance.training_records import meta_of, near, part_of
from safetensors.numpy import load_file

from jspec.objectives.dflash import DFlashObjective
from jspec.objectives.terms import add
from jspec_train.optimizer import adamw, learning_rate_schedule


def run_block_updates(folder: Path) -> None:
    """Updates of a block drafter from several micro-batches each."""
    meta, outputs = meta_of(folder), load_file(folder / "outputs.safetensors")
    recorded = load_file(folder / "inputs.safetensors")
    start = part_of(folder, "draft").parent
    loaded, tables, batch = recorded_start(start)
    objective = DFlashObjective(
        config=loaded.drafter.config, gamma=meta_of(start)["loss_decay_gamma"], chunk_blocks=4
    )
    counted = {int(name.split(".")[1].removeprefix("micro")) for name in recorded}
    micro = [batch, jax.tree.map(lambda a: a[::-1], batch)][: len(counted)]
    assert counted == set(range(len(micro))), (
        f"{folder.name}: micro-batches {sorted(counted)}; the rows of 0 and 1 are known, no others"
    )
    schedule = learning_rate_schedule(
        meta["scheduler"],
        peak=meta["lr"],
        total_steps=len(outputs["losses"]),
        warmup_steps=meta["warmup"],
    )

    def loss_and_grads(params: Any, step: int) -> tuple[Any, Any]:
        at, window = dataclasses.replace(loaded, params=params), []
        for index, data in enumerate(micro):
            blocks = recorded_blocks(recorded, f"step{step}.micro{index}.")
            window.append(numerator_and_grads(objective, at, tables, data, blocks))
        terms = functools.reduce(add, [terms for terms, _ in window])
        summed = zip(*(grads for _, (grads, _) in window), strict=True)
        return terms.loss(), tuple(sum(each) / terms.denominator for each in summed)

    optimizer = adamw(schedule, max_grad_norm=meta["max_grad_norm"])
    params = _updated(loaded.params, optimizer, outputs, loss_and_grads)
    compared = 0
    for ours, theirs in zip(params, leaves_of(start, _final(outputs)), strict=True):
        if not np.isnan(theirs).any():
            compared += 1
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)
    assert compared == len(_final(outputs))


def run_eagle3_updates(folder: Path) -> None:
    """Updates of an EAGLE-3 drafter, and the learning rates."""
    start = start_of(folder)
    meta, outputs = start.meta, start.outputs
    schedule = learning_rate_schedule(
        meta["scheduler"],
        peak=meta["lr"],
        total_steps=meta["total_steps"],
        warmup_steps=int(meta["warmup_ratio"] * meta["total_steps"]),
    )
    start.close("lrs", [schedule(step) for step in range(len(outputs["losses"]))], outputs["lrs"])
    objective = eagle3_objective(start, meta_of(part_of(folder, "draft").parent))
    trained, join = trainable(start, ("draft_ids", "embedding"))

    @jax.jit
    def loss_and_grads(trained: Any, step: Any) -> tuple[Any, Any]:
        def loss(trained: Any) -> Any:
            return objective.terms(join(trained), start.tables, start.batch).loss()

        return jax.value_and_grad(loss)(trained)

    optimizer = adamw(schedule, max_grad_norm=meta["max_grad_norm"])
    trained = _updated(trained, optimizer, outputs, loss_and_grads)
    compared = compare_leaves(start, join(trained), _final(outputs), rtol=0, atol=2e-4)
    assert compared == len(_final(outputs))


def _updated(
    params: Any,
    optimizer: optax.GradientTransformation,
    outputs: Mapping[str, np.ndarray],
    loss_and_grads: Callable[[Any, int], tuple[Any, Any]],
) -> Any:
    """The weights after all recorded updates, whose losses and gradient norms are compared on the way."""
    state = optimizer.init(params)
    for step in range(len(outputs["losses"])):
        loss, grads = loss_and_grads(params, step)
        near(f"loss of update {step}", loss, outputs["losses"][step], rtol=2e-4)
        norm = optax.tree.norm(grads)
        near(f"gradient norm of update {step}", norm, outputs["grad_norms"][step], rtol=1e-3)
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def _final(outputs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The recorded weights at the end."""
    return {name.removeprefix("final."): v for name, v in outputs.items() if name.startswith("final.")}


def run_optimizer(folder: Path) -> None:
    """AdamW on float32 masters with bfloat16 gradients: rates, norms, masters and weights."""
    meta = meta_of(folder)
    recorded, outputs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    for name in outputs:
        if name.startswith("sched."):
            _, kind, total, ratio = re.fullmatch(r"(sched)\.(\w+?)_(\d+)_([\d.]+)", name).groups()
            _check_schedule(kind, int(total), float(ratio), outputs[name])
    total, ratio = meta["total_steps"], meta["warmup_ratio"]
    schedule = _chained(meta["scheduler"], meta["lr"], total, ratio)
    np.testing.assert_allclose([schedule(s) for s in range(total)], outputs["lr"][:total], rtol=1e-5)
    names = [name.removeprefix("init.") for name in recorded if name.startswith("init.")]
    masters = tuple(jnp.asarray(recorded[f"init.{name}"]).astype(jnp.float32) for name in names)
    adam = meta["adamw"]
    optimizer = adamw(
        schedule,
        max_grad_norm=meta["max_grad_norm"],
        weight_decay=adam["weight_decay"],
        b1=adam["betas"][0],
        b2=adam["betas"][1],
        eps=adam["eps"],
    )
    state = optimizer.init(masters)
    for step in range(total):
        grads = tuple(jnp.asarray(recorded[f"grad{step}.{name}"]).astype(jnp.float32) for name in names)
        near(f"norm {step}", optax.tree.norm(grads), outputs["grad_norm"][step])
        updates, state = optimizer.update(grads, state, masters)
        masters = optax.apply_updates(masters, updates)
        for name, master in zip(names, masters, strict=True):
            near(f"master {step} {name}", master, outputs[f"master{step}.{name}"])
            weights = master.astype(jnp.bfloat16).astype(jnp.float32)
            kept = np.asarray(outputs[f"param{step}.{name}"]).astype(np.float32)
            np.testing.assert_allclose(weights, kept, rtol=2**-7, atol=1e-6)


def _chained(name: str, peak: float, total: int, ratio: float) -> Any:
    kind = "cosine_chained" if name == "cosine" else name
    return learning_rate_schedule(kind, peak=peak, total_steps=total, warmup_steps=int(ratio * total))


def _check_schedule(kind: str, total: int, ratio: float, recorded: np.ndarray) -> None:
    """A recorded curve. Its peak is not stated: it is the second entry after the warm-up."""
    warmup = int(ratio * total)
    peak = float(recorded[warmup + 1])
    schedule = _chained(kind, peak, total, ratio)
    ours = [schedule(s) for s in range(len(recorded))]
    np.testing.assert_allclose(ours, recorded, rtol=1e-4, atol=1e-6 * peak)
