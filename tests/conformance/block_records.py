"""What the training cases of block drafters have recorded: start, anchors, masks and gradients."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance.dflash_cases import Weights
from conformance.training_records import RecordedTables, close_grad, find_part, part_of
from safetensors.numpy import load_file

from jspec.checkpoints.dflash import dflash_from_tensors
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.objectives.batch import TrainBatch
from jspec.objectives.block_pass import context_limits
from jspec.objectives.blocks import Blocks, choose_anchors
from pallas_kernels.block_attention.layout import Rules

FEATURES = ("batch.hidden_states", "batch.target_last_hidden_states")  # side by side, as captured


def recorded_start(folder: Path) -> tuple[LoadedDrafter, RecordedTables, TrainBatch]:
    """Weights, tables and batch of the folder that holds them."""
    draft = part_of(folder, "draft")
    values = json.loads((draft / "config.json").read_text())
    weights = Weights(where=f"{folder.name}/draft", arrays=load_file(draft / "model.safetensors"))
    own = find_part(folder, "target.safetensors")  # DeepSpec's drafters hold copies of these tables
    tables = weights.arrays if own is None else load_file(own)
    inputs = load_file(part_of(folder, "inputs.safetensors"))
    lengths = _lengths(inputs)
    rows, tokens = inputs["batch.input_ids"].shape
    index = np.broadcast_to(np.arange(tokens, dtype=np.int32), (rows, tokens))
    batch = TrainBatch(
        ids=jnp.asarray(inputs["batch.input_ids"], jnp.int32),
        loss_mask=jnp.asarray(inputs["batch.loss_mask"] > 0),
        segments=jnp.asarray(index < lengths[:, None], jnp.int32),
        positions=jnp.asarray(index),
        features=jnp.asarray(np.concatenate([inputs[n] for n in FEATURES if n in inputs], axis=2)),
    )
    target = RecordedTables(
        embedding=jnp.asarray(tables["embed_tokens.weight"]), head=jnp.asarray(tables["lm_head.weight"])
    )
    return dflash_from_tensors(values, weights, jnp.float32), target, batch


def _lengths(inputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Tokens of each sample; where the raw samples are not recorded, up to the last supervised one."""
    rows, tokens = inputs["batch.input_ids"].shape
    if "raw0.input_ids" in inputs:
        return np.array([len(inputs[f"raw{i}.input_ids"]) for i in range(rows)])
    mask = inputs["batch.loss_mask"] > 0
    return np.where(mask.any(1), tokens - np.argmax(mask[:, ::-1], axis=1), tokens)


def recorded_blocks(outputs: Mapping[str, np.ndarray], prefix: str = "") -> Blocks:
    return Blocks(
        anchors=jnp.asarray(outputs[f"{prefix}anchor_positions"], jnp.int32),
        keep=jnp.asarray(outputs[f"{prefix}block_keep_mask"]),
    )


def check_anchors(batch: TrainBatch, outputs: Mapping[str, np.ndarray], num_anchors: int) -> None:
    """The recorded random numbers choose the recorded anchors."""
    uniforms = jnp.pad(jnp.asarray(outputs["anchor_random"]), ((0, 0), (0, 1)))
    ours = choose_anchors(batch, uniforms, num_anchors=min(num_anchors, batch.ids.shape[1] - 1))
    width = outputs["anchor_positions"].shape[1]
    np.testing.assert_array_equal(np.asarray(ours.keep)[:, :width], outputs["block_keep_mask"])
    np.testing.assert_array_equal(
        np.asarray(ours.anchors)[:, :width],
        np.where(outputs["block_keep_mask"], outputs["anchor_positions"], 0),
    )
    assert not np.asarray(ours.keep)[:, width:].any()


def check_masks(config: Any, batch: TrainBatch, blocks: Blocks, outputs: Mapping[str, np.ndarray]) -> None:
    """The dense masks [rows, 1, blocks x block, tokens + blocks x block] of every layer type."""
    rows, num_blocks = blocks.keep.shape
    size = config.block_size
    for kind, name in (("full", "mask.full_attention"), ("window", "mask.sliding_attention")):
        if name not in outputs:
            continue
        window = config.decoder.window if kind == "window" else None
        starts, ends = (np.asarray(x)[:, :, None, None] for x in context_limits(batch, blocks))
        token, row = np.arange(batch.ids.shape[1]), np.arange(size)[:, None]
        context = (token >= starts) & (token < ends) & (row >= 0)
        if window is not None:
            context &= token > ends + row - window
        rules = Rules(scale=1.0, block_size=size, window=window, causal=config.causal(kind))
        own = np.einsum("nm,ji->njmi", np.eye(num_blocks, dtype=bool), rules.inside_of_block())
        own = own.reshape(num_blocks * size, num_blocks * size)
        keep = np.repeat(np.asarray(blocks.keep), size, axis=1)
        own = own[None] & keep[:, :, None]
        ours = np.concatenate([context.reshape(rows, num_blocks * size, -1), own], axis=2)
        np.testing.assert_array_equal(ours, outputs[name][:, 0], err_msg=name)


def terms_and_grads(
    objective: Any,
    loaded: LoadedDrafter,
    tables: RecordedTables,
    batch: TrainBatch,
    blocks: Blocks,
) -> tuple[Any, Any]:
    """The terms, and the gradients of the loss for parameters and features."""
    terms, grads = numerator_and_grads(objective, loaded, tables, batch, blocks)
    return terms, jax.tree.map(lambda g: g / terms.denominator, grads)


def numerator_and_grads(
    objective: Any,
    loaded: LoadedDrafter,
    tables: RecordedTables,
    batch: TrainBatch,
    blocks: Blocks,
) -> tuple[Any, Any]:
    def loss(params: Any, features: Any) -> Any:
        terms = objective.terms(params, tables, dataclasses.replace(batch, features=features), blocks)
        return terms.numerator, terms

    (_, terms), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(loaded.params, batch.features)
    return terms, grads


def check_grads(name: str, weights: Path, grads: tuple[Any, Any], recorded: Mapping[str, np.ndarray]) -> None:
    """Gradients of the recorded tensors, brought into our layout by the checkpoint reader."""
    recorded = dict(recorded)
    features = recorded.pop("__input__.hidden_states", None)
    if features is not None:
        width = features.shape[2]
        close_grad(f"{name} features", grads[1][:, :, :width], features)
        assert not np.asarray(grads[1])[:, :, width:].any(), f"{name}: a gradient into the target's states"
    compared = 0
    for index, (ours, theirs) in enumerate(zip(grads[0], leaves_of(weights, recorded), strict=True)):
        if not np.isnan(theirs).any():
            compared += 1
            close_grad(f"{name} leaf {index}", ours, theirs)
    assert compared == len(recorded), (
        f"{name}: {len(recorded)} gradients are recorded, {compared} were compared"
    )


def leaves_of(weights: Path, recorded: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Arrays named and laid out like tensors of the checkpoint, as leaves; NaN where none is recorded."""
    draft = part_of(weights, "draft")
    values = json.loads((draft / "config.json").read_text())
    stored = load_file(draft / "model.safetensors")
    arrays = {name: recorded.get(name, np.full_like(array, np.nan)) for name, array in stored.items()}
    loaded = dflash_from_tensors(values, Weights(where=weights.name, arrays=arrays), jnp.float32)
    return [np.asarray(leaf) for leaf in loaded.params]
