"""Golden cases of training DSpark and Domino: labels, teacher, heads, losses, metrics, walks and gradients."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance.block_records import (
    check_anchors,
    check_grads,
    check_masks,
    recorded_blocks,
    recorded_start,
    terms_and_grads,
)
from conformance.training_records import RecordedTables, meta_of, near
from safetensors.numpy import load_file

from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.drafters.dflash import dflash_net
from jspec.drafters.sequential import Walk, best_choice, correction, teacher_forced, walk
from jspec.objectives.batch import split_features
from jspec.objectives.blocks import Blocks
from jspec.objectives.domino import DominoObjective
from jspec.objectives.draft_rows import DraftRows, draft_rows, training_embed
from jspec.objectives.dspark import DSparkObjective
from jspec.objectives.terms import Terms

# Names of the weights of the loss in meta.json: SpecForge's, DeepSpec's.
WEIGHTS = {
    "cross_entropy_weight": ("dspark_ce_loss_alpha", "ce_loss_alpha"),
    "l1_weight": ("dspark_l1_loss_alpha", "l1_loss_alpha"),
    "confidence_weight": ("dspark_confidence_head_alpha", "confidence_head_alpha"),
}


def run_dspark_training(folder: Path) -> None:
    """Everything on the way to the loss, the loss, all metrics and gradients, and the greedy walk."""
    meta, outputs = meta_of(folder), load_file(folder / "outputs.safetensors")
    loaded, tables, batch = recorded_start(folder)
    config = loaded.drafter.config
    blocks = recorded_blocks(outputs)
    if "anchor_random" in outputs:
        check_anchors(batch, outputs, meta["num_anchors"])
    check_masks(config, batch, blocks, outputs)
    given = {name: next(meta[key] for key in keys if key in meta) for name, keys in WEIGHTS.items()}
    objective = DSparkObjective(config=config, gamma=meta["loss_decay_gamma"], chunk_blocks=5, **given)
    read, states = split_features(batch, objective.captured, config.target_hidden_size)
    own = dataclasses.replace(batch, features=read)
    rows = draft_rows(config, loaded.params, tables, own, blocks, recompute=False)
    _check_rows(rows, blocks, outputs)
    mask = np.cumprod(np.asarray(rows.mask), axis=1) > 0
    np.testing.assert_array_equal(mask, _flat(outputs["eval_mask"]))
    teacher = tables.logits(states.reshape(-1, states.shape[2])[rows.before])
    near("teacher logits", teacher[mask], _flat(outputs["aligned_teacher_logits"])[mask])
    _check_heads(loaded, tables, rows, np.asarray(blocks.keep).reshape(-1), outputs)

    terms, grads = terms_and_grads(objective, loaded, tables, batch, blocks)
    near("loss", terms.loss(), outputs["loss"])
    _check_dspark_metrics(terms, objective, outputs)
    check_grads(folder.name, folder, grads, load_file(folder / "grads.safetensors"))


def run_domino_training(folder: Path) -> None:
    """The same of Domino, whose share of the base loss is recorded as a number and as a schedule."""
    meta, outputs = meta_of(folder), load_file(folder / "outputs.safetensors")
    loaded, tables, batch = recorded_start(folder)
    config = loaded.drafter.config
    assert config.anchor_predicts == meta["shift_label"]
    blocks = recorded_blocks(outputs)
    check_anchors(batch, outputs, meta["num_anchors"])
    check_masks(config, batch, blocks, outputs)
    rows = draft_rows(config, loaded.params, tables, batch, blocks, recompute=False)
    _check_rows(rows, blocks, outputs)
    _check_heads(loaded, tables, rows, np.asarray(blocks.keep).reshape(-1), outputs)

    objective = DominoObjective(
        config=config, gamma=meta["loss_decay_gamma"], base_start=meta["lambda_base"], chunk_blocks=5
    )
    terms, grads = terms_and_grads(objective, loaded, tables, batch, blocks)
    near("loss", terms.loss(), outputs["loss"])
    means = {name: np.sum(total) / np.sum(count) for name, (total, count) in terms.metrics.items()}
    for name, ours in (
        ("final_loss", means["cross_entropy"]),
        ("base_loss", means["base_cross_entropy"]),
        ("base_accuracy", means["base_accuracy"]),
        ("accept_len", means["accept_length"] + 1),  # there, with the bonus
        ("base_accept_len", means["base_accept_length"] + 1),
        ("accuracy_denom", np.sum(terms.metrics["accuracy"][1])),
    ):
        near(name, ours, outputs[f"metric.{name}"])
    near("accuracy", means["accuracy"], outputs["accuracy"])
    for key, values in meta.items():
        if key.startswith("linear_lambda_base_steps_"):
            _check_schedule(config, key, values)
    check_grads(folder.name, folder, grads, load_file(folder / "grads.safetensors"))


def _flat(array: np.ndarray) -> np.ndarray:
    """[rows, blocks, ...] as [rows x blocks, ...]."""
    return array.reshape(-1, *array.shape[2:])


def _check_rows(rows: DraftRows, blocks: Blocks, outputs: Mapping[str, np.ndarray]) -> None:
    """Hidden states of kept blocks, and labels where they are supervised."""
    keep, drafts = np.asarray(blocks.keep).reshape(-1), rows.labels.shape[1]
    hidden = outputs["draft_hidden"].reshape(len(keep), -1, rows.hidden.shape[2])
    near("draft_hidden", rows.hidden[keep], hidden[keep][:, -drafts:])
    if "target_ids" in outputs:
        mask = np.asarray(rows.mask) > 0
        np.testing.assert_array_equal(np.asarray(rows.labels)[mask], _flat(outputs["target_ids"])[mask])


def _check_heads(
    loaded: LoadedDrafter,
    tables: RecordedTables,
    rows: DraftRows,
    keep: np.ndarray,
    outputs: Mapping[str, np.ndarray],
) -> None:
    """Base and corrected logits, confidence, and the greedy walk, of kept blocks."""
    net = dflash_net(loaded.drafter.config, loaded.params)
    embed, drafts = training_embed(net, tables), rows.labels.shape[1]
    supervised = np.asarray(rows.mask) > 0
    logits = base = tables.logits(rows.hidden)
    read = None
    if net.head is not None:
        read = net.head.read(rows.predecessors, embed)
        logits = base + correction(teacher_forced(net.head, rows.hidden, read), net.head.output[...])
    for name, ours in (("base_logits", base), ("draft_logits", logits), ("final_logits", logits)):
        if name in outputs:
            theirs = _flat(outputs[name])[:, -drafts:]
            near(name, np.asarray(ours)[supervised], theirs[supervised])
    if "confidence_logits" in outputs:
        assert net.confidence_head is not None
        ours = net.confidence_head.logits(rows.hidden, read)
        near("confidence", ours[supervised], _flat(outputs["confidence_logits"])[supervised])

    def greedy() -> Walk:
        drafting = jnp.ones(keep.shape, bool)
        anchors = rows.predecessors[:, 0]
        choose = lambda row, scores: best_choice(scores)  # noqa: E731
        return walk(net.head, embed, anchors, drafting, rows.hidden, base, choose)

    line = jax.jit(greedy)()
    for name in ("greedy_tokens", "greedy_block_tokens"):
        if name in outputs:
            wanted = outputs[name][keep]
            np.testing.assert_array_equal(np.asarray(line.tokens)[keep, : wanted.shape[1]], wanted)
    if "greedy_corrected_logits" in outputs and net.head is not None:
        before = jnp.concatenate([rows.predecessors[:, :1], line.tokens[:, :-1]], axis=1)
        latents = teacher_forced(net.head, rows.hidden, net.head.read(before, embed))
        ours = base + correction(latents, net.head.output[...])
        near("greedy logits", ours[keep], outputs["greedy_corrected_logits"][keep])


def _check_dspark_metrics(
    terms: Terms, objective: DSparkObjective, outputs: Mapping[str, np.ndarray]
) -> None:
    """Recorded sums. Some of them weigh rows by position, where ours are per draft token."""
    metrics = {name: (np.asarray(total), np.asarray(count)) for name, (total, count) in terms.metrics.items()}
    drafts = len(metrics["acceptance"][0])
    gamma = objective.gamma
    weights = np.ones(drafts) if gamma is None else np.exp(-np.arange(drafts) / gamma)
    compared = 0
    for prefix in ("ratio", "metric"):
        for recorded, (name, kind) in _METRICS.items():
            key = f"{prefix}.{recorded}"
            if f"{key}.num" not in outputs:
                continue
            if name not in metrics:  # of a head that this drafter does not have
                assert not outputs[f"{key}.num"].any(), f"{key}: recorded, but not computed"
                continue
            total, count = metrics[name]
            if kind == "sum":
                total, count = total.sum(), count.sum()
            elif kind == "weighted":
                total, count = (total * weights).sum(), (count * weights).sum()
            near(f"{key}.num", total, outputs[f"{key}.num"])
            near(f"{key}.den", count, outputs[f"{key}.den"])
            compared += 1
    for draft in range(drafts):
        if f"metric.accept_rate@{draft}.num" in outputs:
            near("accept_rate", metrics["acceptance"][0][draft], outputs[f"metric.accept_rate@{draft}.num"])
    assert compared >= 4
    if "confidence_loss" in metrics:
        np.testing.assert_array_equal(metrics["binned_confidence"][1].sum(), metrics["acceptance"][1].sum())


_METRICS = {
    "acc": ("accuracy", "sum"),
    "accuracy_position": ("accuracy", "same"),
    "ce_position": ("cross_entropy", "same"),
    "ce_loss": ("cross_entropy_loss", "same"),
    "l1_loss": ("l1_loss", "same"),
    "confidence_loss": ("confidence_loss", "same"),
    "confidence_abs_error": ("confidence_error", "weighted"),
    "confidence_bias": ("confidence_bias", "weighted"),
    "confidence_cumprod_bias": ("survival_bias", "weighted"),
    "teacher_agreement": ("teacher_agreement", "sum"),
    "teacher_top1_prob": ("teacher_top_prob", "sum"),
    "draft_top1_prob": ("draft_top_prob", "sum"),
    "tau_probabilistic": ("tau_probabilistic", "same"),
}


def _check_schedule(config: Any, key: str, values: list[float]) -> None:
    """A recorded schedule; its name says steps, length, start and decay ("05" is 0.5, "1" is 1)."""
    steps, _, rest = key.removeprefix("linear_lambda_base_steps_").partition("_of_")
    total, start, decay = rest.split("_")
    number = lambda text: float(f"{text[0]}.{text[1:] or 0}")  # noqa: E731
    objective = DominoObjective(
        config=config,
        total_steps=int(total),
        base_start=number(start.removeprefix("start")),
        base_ratio=number(decay.removeprefix("decay")),
    )
    for step, value in zip(steps.split("_"), values, strict=True):
        near(f"share at {step}", objective.base_share(int(step)), value)
