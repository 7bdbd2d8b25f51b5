"""Golden cases of training DFlash and DFlash 2: masks, hidden states, losses, metrics and gradients."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from conformance.block_records import (
    check_anchors,
    check_grads,
    check_masks,
    recorded_blocks,
    recorded_start,
    terms_and_grads,
)
from conformance.training_records import meta_of, near, part_of
from safetensors.numpy import load_file

from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash_net import draft_logits
from jspec.objectives.block_pass import training_hidden
from jspec.objectives.blocks import block_targets
from jspec.objectives.dflash import DFlashObjective, SelectorTerm

DPACE = {
    "dpace": "dpace",
    "dpace-cumulative-confidence-only": "dpace_cumulative",
    "dpace-continuation-value-only": "dpace_continuation",
}


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
    blocks = recorded_blocks(load_file(part_of(folder, "draft").parent / "outputs.safetensors"))
    terms, grads = terms_and_grads(objective, loaded, tables, batch, blocks)
    near("numerator", terms.numerator, outputs["loss_terms.num"])
    near("denominator", terms.denominator, outputs["loss_terms.den"])
    near("loss", terms.loss(), outputs["loss"])
    check_grads(folder.name, folder, grads, load_file(folder / "grads.safetensors"))


def run_dflash2_objectives(folder: Path) -> None:
    """Every variant of the DFlash 2 loss on the weights of another case, and the schedule of alpha."""
    meta, outputs = meta_of(folder), load_file(folder / "outputs.safetensors")
    loaded, tables, batch = recorded_start(folder)
    sibling = part_of(folder, "draft").parent
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
