"""Golden cases of training EAGLE, EAGLE-3 and P-EAGLE: rows, states, logits, losses, metrics and gradients."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance.eagle_cases import run_eagle_greedy
from conformance.eagle_records import CHUNK, Start, check_loss, eagle3_objective, start_of
from conformance.training_records import meta_of
from safetensors.numpy import load_file

from jspec.checkpoints.eagle_vocabulary import differences_of_ids, mask_of_ids
from jspec.drafters.eagle_net import eagle_net
from jspec.objectives.depth_samples import depth_sample, sample_sizes
from jspec.objectives.eagle import EagleObjective
from jspec.objectives.eagle3 import Eagle3Objective
from jspec.objectives.eagle_pass import first_pass, rollouts
from jspec.objectives.peagle import PEagleObjective, parallel_states
from jspec.objectives.rollouts import all_places, rollout_rows, visible_context
from jspec.objectives.soft_labels import read_teacher, soft_labels
from jspec_train.vocabulary import most_frequent


def run_eagle3_training(folder: Path) -> None:
    """Rollouts of every row where states are recorded; the loss, metrics of each depth, all gradients."""
    start = start_of(folder)
    objective = eagle3_objective(start)
    if "depth0.logits" in start.outputs:
        _check_depths(start, objective)
    terms = check_loss(start, objective, None)
    outputs, metrics = start.outputs, terms.metrics
    by_depth = {
        "acc_corrects": metrics["accuracy"][0],
        "acc_denoms": metrics["accuracy"][1],
        "acceptance_rates": metrics["acceptance"][0] / metrics["acceptance"][1],
    }
    if objective.loss == "cross_entropy":
        positions = start.batch.ids.size
        by_depth |= {
            "plosses": metrics["cross_entropy"][0] / positions,
            "metric_loss_denoms": np.full(objective.depths, positions),
        }
    scalars = {
        "metric.tau_greedy": (metrics["accept_length"][0], metrics["accept_length"][1]),
        "metric.tau_probabilistic": metrics["expected_accept_length"],
    }
    for name, value in by_depth.items():
        if name in outputs:
            start.close(name, value, outputs[name])
    for name, (total, count) in scalars.items():
        if f"{name}.num" in outputs:  # the bonus is counted there
            start.close(f"{name}.num", total + count, outputs[f"{name}.num"])
            start.close(f"{name}.den", count, outputs[f"{name}.den"])
    for depth in range(objective.depths):
        for ours, theirs in (("accuracy", "accuracy"), ("acceptance", "accept_rate")):
            for part, value in zip(("num", "den"), metrics[ours], strict=True):
                name = f"metric.{theirs}@{depth}.{part}"
                if name in outputs:
                    start.close(name, value[depth], outputs[name])
        if f"metric.ploss_{depth}" in outputs:
            ploss = metrics["cross_entropy"][0][depth] / start.batch.ids.size
            start.close(f"ploss_{depth}", ploss, outputs[f"metric.ploss_{depth}"])


def run_eagle_training(folder: Path) -> None:
    """Feature regression and token term, and greedy decoding with the same weights where it is recorded."""
    start = start_of(folder)
    meta, outputs = start.meta, start.outputs
    weights = meta["weights_loss"]
    objective = EagleObjective(
        config=start.config, feature_weight=weights["v_w"], token_weight=weights["p_w"], chunk=CHUNK
    )
    batch, tables = start.batch, start.tables

    @jax.jit
    def predicted(params: Any) -> Any:
        states = first_pass(eagle_net(start.config, params), tables.embed, batch, batch.features).states
        return states, tables.logits(states.reshape(-1, states.shape[2]))

    states, logits = predicted(start.loaded.params)
    inside = np.arange(start.batch.ids.shape[1]) < start.lengths[:, None] - 1
    start.close("predict", np.asarray(states)[inside], outputs["predict"][inside])
    logits = np.asarray(logits).reshape(outputs["draft_logits"].shape)
    start.close("draft_logits", logits[inside], outputs["draft_logits"][inside])
    terms = check_loss(start, objective, objective.choose(start.batch, jax.random.key(0)))
    metrics = terms.metrics
    for name, ours in (("vloss", "feature_loss"), ("ploss", "cross_entropy")):
        start.close(name, metrics[ours][0] / metrics[ours][1], outputs[name])
    start.close("correct", metrics["accuracy"][0], outputs["correct"])
    start.close("count", metrics["accuracy"][1], outputs["count"])
    if "greedy.prefill_len" in outputs:
        run_eagle_greedy(folder)


def run_peagle_training(folder: Path) -> None:
    """The recorded rows: their mask, states, logits, the loss, counts of each depth and all gradients."""
    start = start_of(folder)
    meta, outputs, config = start.meta, start.outputs, start.config
    anchors, depths = outputs["anchor_pos"], outputs["depth"]
    tokens = start.batch.ids.shape[1]
    objective = PEagleObjective(
        config=config,
        depths=meta["num_depths"],
        ratio=meta["down_sample_ratio"],
        least=meta["down_sample_ratio_min"],
        chunk=CHUNK,
    )
    _check_sizes(start, objective, depths)
    deep = depths > 0
    sample = depth_sample(
        jnp.asarray(anchors[deep][None], jnp.int32),
        jnp.asarray(depths[deep][None], jnp.int32),
        tokens,
        objective.depths - 1,
    )
    # Depth-0 rows of the recording, and where the others are behind them in ours.
    order = np.where(deep, tokens + np.cumsum(deep) - 1, anchors)
    seen = np.asarray(visible_context(start.batch, jnp.asarray(anchors[None], jnp.int32)))[0]
    mask = np.zeros((anchors.size, tokens + deep.sum()), bool)
    mask[:, :tokens] = seen
    for row, own in zip(np.flatnonzero(deep), np.asarray(sample.own)[0], strict=True):
        mask[row, tokens + own[own >= 0]] = True
    if "attention_mask" in outputs:
        real = anchors < start.lengths[0]
        start.same("attention_mask", mask[:, order][real], outputs["attention_mask"][0, 0][real])

    @jax.jit
    def parallel(params: Any) -> Any:
        net = eagle_net(config, params)
        read = start.batch.features[:, :, : config.features_size]
        states = parallel_states(net, start.tables, start.batch, read, sample)[0]
        return states, net.logits(states, start.tables.logits)

    states, logits = (np.asarray(array)[order] for array in parallel(start.loaded.params))
    inside = anchors < start.lengths[0] - 1
    start.close("backbone_out", states[inside], outputs["backbone_out"][0][inside])
    start.close("logits", logits[inside], outputs["logits"][0][inside])
    metrics = check_loss(start, objective, sample).metrics
    correct, known = metrics["accuracy_of_drafted"]
    for depth in range(objective.depths):
        start.close(f"correct {depth}", correct[depth], outputs[f"position_{depth}_acc_sum"])
        start.close(f"known {depth}", known[depth], outputs[f"position_{depth}_acc_total"])
    start.close("full_acc_sum", np.sum(correct), outputs["full_acc_sum"])
    start.close("full_acc_total", np.sum(known), outputs["full_acc_total"])


def run_vocab_mapping(folder: Path) -> None:
    """Counts of supervised tokens to the mapping."""
    meta = meta_of(folder)
    inputs, outputs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    counts = np.bincount(inputs["input_ids"][inputs["loss_mask"] > 0], minlength=meta["target_vocab_size"])
    np.testing.assert_array_equal(counts, outputs["counts"])
    ids = most_frequent(counts, meta["draft_vocab_size"])
    np.testing.assert_array_equal(differences_of_ids(ids), outputs["d2t"])
    np.testing.assert_array_equal(mask_of_ids(ids, meta["target_vocab_size"]), outputs["t2d"])


def _check_depths(start: Start, objective: Eagle3Objective) -> None:
    """Rows, states and logits of each depth; what is computed where the text has ended differs there, too."""
    config, outputs, batch = start.config, start.outputs, start.batch
    places = all_places(batch)

    @jax.jit  # one program instead of one per operation
    def computed(params: Any) -> Any:
        net = eagle_net(config, params)
        features, last = jnp.split(batch.features, [config.features_size], axis=2)
        first = first_pass(net, start.tables.embed, batch, features)
        states = rollouts(net, start.tables.embed, batch, first, places, objective.depths)
        teacher = read_teacher(start.tables, last, jnp.ones(places.shape, jnp.bool_))
        rows = [rollout_rows(batch, places, depth) for depth in range(objective.depths)]
        logits = [net.logits(state.reshape(-1, state.shape[2]), start.tables.logits) for state in states]
        labels = [soft_labels(start.tables, teacher, row.teachers) for row in rows]
        return teacher, list(zip(states, logits, rows, labels, strict=True))

    teacher, by_depth = computed(start.loaded.params)
    for depth, (state, logits, row, labels) in enumerate(by_depth):
        inside = np.asarray(places) + depth + 1 < start.lengths[:, None]
        name = f"depth{depth}"
        start.close(f"{name}.state_out", np.asarray(state)[inside], outputs[f"{name}.state_out"][inside])
        logits = np.asarray(logits).reshape(outputs[f"{name}.logits"].shape)
        start.close(f"{name}.logits", logits[inside], outputs[f"{name}.logits"][inside])
        if f"{name}.input_ids" not in outputs:
            continue
        start.same(f"{name}.input_ids", np.asarray(row.ids)[inside], outputs[f"{name}.input_ids"][inside])
        start.same(f"{name}.loss_mask", row.supervised, outputs[f"{name}.loss_mask"][:, :, 0] > 0)
        known = np.asarray(labels.columns).reshape(inside.shape) >= 0
        start.same(
            f"{name}.position_mask",
            known & np.asarray(row.supervised),
            outputs[f"{name}.position_mask"][:, :, 0] > 0,
        )
        best = np.take_along_axis(np.asarray(teacher.best), np.asarray(row.teachers), axis=1)
        start.same(f"{name}.target_token_ids", best[inside], outputs[f"{name}.target_token_ids"][inside])
        for what, ours in (
            ("target_p", jax.nn.softmax(labels.logits, axis=1)),
            ("target_p_on_draft", jnp.exp(labels.logits - labels.log_normaliser[:, None])),
        ):
            if f"{name}.{what}" not in outputs:
                continue
            recorded = outputs[f"{name}.{what}"]
            ours = np.asarray(ours).reshape(recorded.shape)
            start.close(f"{name}.{what}", ours[inside], recorded[inside])


def _check_sizes(start: Start, objective: PEagleObjective, depths: np.ndarray) -> None:
    """Ours draws as many rows of each depth where as many are eligible, never more."""
    sample = np.asarray(jax.jit(objective.choose)(start.batch, jax.random.key(0)).depths)[0]
    supervised = int(np.asarray(start.batch.loss_mask)[0, : start.lengths[0] - 1].sum())
    sizes = sample_sizes(supervised, depths=objective.depths, ratio=objective.ratio, least=objective.least)
    for depth, size in enumerate(sizes, start=1):
        assert (depths == depth).sum() <= size, f"{start.folder.name}: {size} rows of depth {depth}"
        assert (sample == depth).sum() <= size
