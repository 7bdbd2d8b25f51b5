"""Golden cases of training DFlash and DFlash 2: masks, hidden states, losses, metrics and gradients."""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conformance.dflash_cases import Weights
from safetensors.numpy import load_file

from jspec.checkpoints.dflash import dflash_from_tensors
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash_net import draft_logits
from jspec.objectives.batch import TrainBatch
from jspec.objectives.block_pass import block_mask, context_mask, training_hidden
from jspec.objectives.blocks import Blocks, block_targets, choose_anchors
from jspec.objectives.dflash import DFlashObjective, SelectorTerm
from jspec.objectives.terms import add
from jspec_train.optimizer import adamw, learning_rate_schedule
from pallas_kernels.pytree import pytree

RTOL, ATOL = 1e-4, 2e-5
GRAD_RTOL, GRAD_ATOL = 1e-3, 1e-5
SHARING = r"same_.*as|same_as|start|inputs_and_target"  # keys of meta.json that name sibling cases
FEATURES = ("batch.hidden_states", "batch.target_last_hidden_states")  # side by side, as captured
DPACE = {
    "dpace": "dpace",
    "dpace-cumulative-confidence-only": "dpace_cumulative",
    "dpace-continuation-value-only": "dpace_continuation",
}


@pytree
class RecordedTables:
    """The two tables of a case."""

    embedding: jax.Array
    head: jax.Array

    def embed(self, ids: jax.Array) -> jax.Array:
        """Rows of the recorded table."""
        return self.embedding[ids]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """The recorded head."""
        return hidden @ self.head.T


def run_block_training(folder: Path) -> None:
    """A case with its own weights: everything on the way to the loss, the loss and all gradients."""
    meta, outputs = meta_of(folder), load_file(folder / "outputs.safetensors")
    loaded, tables, batch = recorded_start(folder)
    config = loaded.drafter.config
    blocks = recorded_blocks(outputs)
    check_anchors(batch, outputs, meta["num_anchors"])
    targets = block_targets(batch, blocks, block_size=config.block_size)
    check_masks(config, batch, blocks, outputs)
    hidden = training_hidden(dflash_net(config, loaded.params), tables.embed, batch, blocks, targets)
    keep = np.asarray(blocks.keep)
    near("draft_hidden", hidden[keep], outputs["draft_hidden"].reshape(hidden.shape)[keep])
    logits = draft_logits(config, tables.logits(hidden.reshape(-1, hidden.shape[-1])))
    recorded = outputs["base_logits" if "base_logits" in outputs else "unary_logits"]
    near("logits", np.asarray(logits).reshape(recorded.shape)[keep], recorded[keep])
    for name, ours in (("target_ids", targets.labels), ("predecessor_ids", targets.predecessors)):
        if name in outputs:
            mask = np.asarray(targets.mask)
            np.testing.assert_array_equal(np.asarray(ours)[mask], outputs[name][mask], err_msg=name)

    objective = _objective(config, meta)
    terms, grads = terms_and_grads(objective, loaded, tables, batch, blocks)
    near("loss", terms.loss(), outputs["loss"])
    _check_metrics(terms, outputs)
    check_grads(folder.name, folder, grads, load_file(folder / "grads.safetensors"))


def run_dpace(folder: Path) -> None:
    """D-PACE on the weights of another case, divided by the number of rows as in the older version."""
    meta, outputs = meta_of(folder), load_file(folder / "outputs.safetensors")
    loaded, tables, batch = recorded_start(folder)
    objective = DFlashObjective(
        config=loaded.drafter.config,
        weighting=DPACE[meta["loss_type"]],
        dpace_alpha=meta["dpace_alpha"],
        dpace_denominator="rows",
        chunk_blocks=3,
    )
    blocks = recorded_blocks(load_file(_anchors_of(folder) / "outputs.safetensors"))
    terms, grads = terms_and_grads(objective, loaded, tables, batch, blocks)
    near("numerator", terms.numerator, outputs["loss_terms.num"])
    near("denominator", terms.denominator, outputs["loss_terms.den"])
    near("loss", terms.loss(), outputs["loss"])
    check_grads(folder.name, folder, grads, load_file(folder / "grads.safetensors"))


def run_dflash2_objectives(folder: Path) -> None:
    """Every variant of the DFlash 2 loss on the weights of another case, and the schedule of alpha."""
    meta, outputs = meta_of(folder), load_file(folder / "outputs.safetensors")
    loaded, tables, batch = recorded_start(folder)
    sibling = _anchors_of(folder)
    config, base = loaded.drafter.config, meta_of(sibling)
    blocks = recorded_blocks(load_file(sibling / "outputs.safetensors"))
    grads_of = load_file(folder / "grads.safetensors")
    variants = {name.rpartition(".")[0] for name in outputs}
    for variant in sorted(variants):
        expected = {
            name.rpartition(".")[2]: v for name, v in outputs.items() if name.rpartition(".")[0] == variant
        }
        objective = DFlashObjective(config=config, chunk_blocks=5, **_variant(variant, base, meta))
        terms, grads = terms_and_grads(objective, loaded, tables, batch, blocks)
        near(f"{variant} loss", terms.loss(), expected["loss"])
        near(f"{variant} loss_den", terms.denominator, expected["loss_den"])
        probability = np.sum(terms.metrics["label_prob"][0])
        near(f"{variant} target_probability_num", probability, expected["target_probability_num"])
        recorded = {
            n.removeprefix(f"{variant}."): g for n, g in grads_of.items() if n.startswith(f"{variant}.")
        }
        check_grads(f"{folder.name} {variant}", folder, grads, recorded)
    schedules = [key for key in meta if key.startswith("selector_alpha_schedule")]
    for key in schedules:
        total, warmup, ramp = re.fullmatch(r".*_total(\d+)_warmup([\d_]+)_ramp([\d_]+)", key).groups()
        term = SelectorTerm(
            warmup_ratio=float(warmup.replace("_", ".")), ramp_ratio=float(ramp.replace("_", "."))
        )
        for step, alpha in meta[key]:
            near(f"alpha at {step}", term.at(step, int(total)), alpha)


def run_block_updates(folder: Path) -> None:
    """Updates of several micro-batches each: losses, gradient norms and the weights at the end."""
    meta, outputs = meta_of(folder), load_file(folder / "outputs.safetensors")
    recorded = load_file(folder / "inputs.safetensors")
    start = part_of(folder, "draft").parent
    loaded, tables, batch = recorded_start(start)
    base = meta_of(start)
    objective = DFlashObjective(config=loaded.drafter.config, gamma=base["loss_decay_gamma"], chunk_blocks=4)
    micro = [batch, jax.tree.map(lambda a: a[::-1], batch)]
    steps = len(outputs["losses"])
    counted = {int(name.split(".")[1].removeprefix("micro")) for name in recorded}
    assert counted == set(range(len(micro))), (
        f"{folder.name}: micro-batches {counted}; meta tells of {len(micro)}"
    )
    schedule = learning_rate_schedule(
        meta["scheduler"], peak=meta["lr"], total_steps=steps, warmup_steps=meta["warmup"]
    )
    optimizer = adamw(schedule, max_grad_norm=meta["max_grad_norm"])
    params, state = loaded.params, optimizer.init(loaded.params)
    for step in range(steps):
        window = []
        for index, data in enumerate(micro):
            blocks = recorded_blocks(recorded, f"step{step}.micro{index}.")
            at = dataclasses.replace(loaded, params=params)
            window.append(_sums_and_grads(objective, at, tables, data, blocks))
        terms = functools.reduce(add, [terms for terms, _ in window])
        grads = [sum(each) / terms.denominator for each in zip(*(grads for _, grads in window), strict=True)]
        near(f"loss of update {step}", terms.loss(), outputs["losses"][step], rtol=2e-4)
        norm = optax.tree.norm(grads)
        near(f"gradient norm of update {step}", norm, outputs["grad_norms"][step], rtol=1e-3)
        updates, state = optimizer.update(tuple(grads), state, params)
        params = optax.apply_updates(params, updates)
    final = {name.removeprefix("final."): v for name, v in outputs.items() if name.startswith("final.")}
    for ours, theirs in zip(params, _leaves_of(start, final), strict=True):
        if not np.isnan(theirs).any():
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=2e-4)


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


def _variant(name: str, base: Mapping[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """The settings behind the name of a variant."""
    gamma = {"gamma": base["loss_decay_gamma"]}
    alpha = re.fullmatch(r"alpha([\d.]+)", name)
    if alpha:
        return gamma | {"selector": SelectorTerm(alpha=float(alpha[1]))}
    known: dict[str, dict[str, Any]] = {
        "stop_gradient": gamma | {"selector": SelectorTerm(stop_gradient=True)},
        "no_gamma": {},
        "dpace": {"weighting": "dpace"},
        "dpace_cumulative": {"weighting": "dpace_cumulative"},
        "dpace_continuation": {"weighting": "dpace_continuation"},
        "lk_tv": gamma | {"loss": "lk_tv"},
        "lk_alpha": gamma | {"loss": "lk_alpha"},
    }
    if name == "lk_lambda":
        scales = {key: meta["lk_lambda"][key] for key in ("kl_scale", "kl_decay")}
        return gamma | {"loss": "lk_lambda"} | scales
    assert name in known, f"{name}: a variant that this runner does not know"
    return known[name]


def meta_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "meta.json").read_text())


def find_part(folder: Path, name: str) -> Path | None:
    """A file of a case, or of a sibling that its meta says it shares it with; None if there is none."""
    if (folder / name).exists():
        return folder / name
    shared = [str(v) for key, v in meta_of(folder).items() if re.fullmatch(SHARING, key)]
    for word in re.findall(r"[^\s,;()]+", " ".join(shared)):
        sibling = folder.parent / word
        if sibling != folder and (sibling / "meta.json").is_file():
            found = find_part(sibling, name)
            if found is not None:
                return found
    return None


def part_of(folder: Path, name: str) -> Path:
    found = find_part(folder, name)
    assert found is not None, f"{folder.name}: no {name} here or in the cases that its meta names"
    return found


def _anchors_of(folder: Path) -> Path:
    """The sibling that recorded weights, inputs and anchors of this case."""
    return part_of(folder, "draft").parent


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
        context = np.asarray(context_mask(config, kind, batch, blocks, size))
        own = np.einsum(
            "nm,ji->njmi", np.eye(num_blocks, dtype=bool), np.asarray(block_mask(config, kind, size))
        )
        own = own.reshape(num_blocks * size, num_blocks * size)
        keep = np.repeat(np.asarray(blocks.keep), size, axis=1)
        own = own[None] & keep[:, :, None]
        ours = np.concatenate([context.reshape(rows, num_blocks * size, -1), own], axis=2)
        np.testing.assert_array_equal(ours, outputs[name][:, 0], err_msg=name)


def _objective(config: Any, meta: Mapping[str, Any]) -> DFlashObjective:
    assert meta["loss_type"] == "dflash", meta["loss_type"]
    selector = SelectorTerm(
        alpha=meta.get("selector_loss_alpha", 1.0), stop_gradient=meta.get("selector_stop_gradient", False)
    )
    return DFlashObjective(
        config=config,
        num_anchors=meta["num_anchors"],
        gamma=meta["loss_decay_gamma"],
        selector=selector,
        chunk_blocks=meta.get("objective_chunk_blocks") or 4,
    )


def terms_and_grads(
    objective: Any,
    loaded: LoadedDrafter,
    tables: RecordedTables,
    batch: TrainBatch,
    blocks: Blocks,
) -> tuple[Any, Any]:
    """The terms, and the gradients of the loss for parameters and features."""
    terms, grads = _numerator_grads(objective, loaded, tables, batch, blocks)
    return terms, jax.tree.map(lambda g: g / terms.denominator, grads)


def _sums_and_grads(
    objective: DFlashObjective,
    loaded: LoadedDrafter,
    tables: RecordedTables,
    batch: TrainBatch,
    blocks: Blocks,
) -> tuple[Any, Any]:
    terms, grads = _numerator_grads(objective, loaded, tables, batch, blocks)
    return terms, grads[0]


def _numerator_grads(
    objective: Any,
    loaded: LoadedDrafter,
    tables: RecordedTables,
    batch: TrainBatch,
    blocks: Blocks,
) -> tuple[Any, Any]:
    def loss(params: Any, features: Any) -> Any:
        terms = objective.terms(params, tables, with_features(batch, features), blocks)
        return terms.numerator, terms

    (_, terms), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(loaded.params, batch.features)
    return terms, grads


def with_features(batch: TrainBatch, features: Any) -> TrainBatch:
    return TrainBatch(
        ids=batch.ids,
        loss_mask=batch.loss_mask,
        segments=batch.segments,
        positions=batch.positions,
        features=features,
    )


def _check_metrics(terms: Any, outputs: Mapping[str, np.ndarray]) -> None:
    """Recorded sums; the accept lengths there count the bonus of every kept block."""
    metrics = {name: (np.sum(a), np.sum(b)) for name, (a, b) in terms.metrics.items()}
    expected = {
        "ratio.acc.num": metrics["accuracy"][0],
        "ratio.acc.den": metrics["accuracy"][1],
        "correct_num": metrics["accuracy"][0],
        "accuracy_den": metrics["accuracy"][1],
        "loss_den": terms.denominator,
        "target_probability_num": metrics["label_prob"][0],
    }
    if "metric.block_den" in outputs:
        blocks = metrics["accept_length"][1]
        expected |= {
            "metric.block_den": blocks,
            "metric.expected_accepted_length_num": metrics["expected_accept_length"][0] + blocks,
            "metric.oracle_accepted_length_num": metrics["oracle_accept_length"][0] + blocks,
            "metric.serving_accepted_length_num": metrics["walk_accept_length"][0] + blocks,
            "selector_covered_num": metrics["coverage"][0],
        }
    for name, value in expected.items():
        if name in outputs:
            near(name, value, outputs[name])


def check_grads(name: str, weights: Path, grads: tuple[Any, Any], recorded: Mapping[str, np.ndarray]) -> None:
    """Gradients of the recorded tensors, brought into our layout by the checkpoint reader."""
    recorded = dict(recorded)
    features = recorded.pop("__input__.hidden_states", None)
    if features is not None:
        width = features.shape[2]
        _close_grad(f"{name} features", grads[1][:, :, :width], features)
        assert not np.asarray(grads[1])[:, :, width:].any(), f"{name}: a gradient into the target's states"
    compared = 0
    for index, (ours, theirs) in enumerate(zip(grads[0], _leaves_of(weights, recorded), strict=True)):
        if not np.isnan(theirs).any():
            compared += 1
            _close_grad(f"{name} leaf {index}", ours, theirs)
    assert compared == len(recorded), (
        f"{name}: {len(recorded)} gradients are recorded, {compared} were compared"
    )


def _leaves_of(weights: Path, recorded: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """Arrays named and laid out like tensors of the checkpoint, as leaves; NaN where none is recorded."""
    draft = part_of(weights, "draft")
    values = json.loads((draft / "config.json").read_text())
    stored = load_file(draft / "model.safetensors")
    arrays = {name: recorded.get(name, np.full_like(array, np.nan)) for name, array in stored.items()}
    loaded = dflash_from_tensors(values, Weights(where=weights.name, arrays=arrays), jnp.float32)
    return [np.asarray(leaf) for leaf in loaded.params]


def near(name: str, ours: Any, theirs: Any, rtol: float = RTOL) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=rtol, atol=ATOL, err_msg=name)


def _close_grad(name: str, ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(np.asarray(ours), theirs, rtol=GRAD_RTOL, atol=GRAD_ATOL, err_msg=name)
