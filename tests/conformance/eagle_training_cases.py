"""Golden cases of training EAGLE, EAGLE-3 and P-EAGLE: rows, states, logits, losses, metrics and gradients."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from conformance.block_training_cases import RecordedTables, find_part
from conformance.dflash_cases import Weights
from conformance.eagle_cases import LAYERS, run_eagle_greedy
from safetensors.numpy import load_file

from jspec.checkpoints.eagle import eagle_from_tensors
from jspec.checkpoints.eagle_config import DEEPSPEC
from jspec.checkpoints.eagle_vocabulary import differences_of_ids, mask_of_ids
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.drafters.eagle_net import eagle_leaves, eagle_net
from jspec.objectives.batch import TrainBatch
from jspec.objectives.depth_samples import depth_sample, sample_sizes
from jspec.objectives.eagle import EagleObjective
from jspec.objectives.eagle3 import Eagle3Objective
from jspec.objectives.eagle_pass import first_pass, rollouts
from jspec.objectives.frozen import Tables, draft_tables
from jspec.objectives.peagle import PEagleObjective, parallel_states
from jspec.objectives.rollouts import all_places, rollout_rows, visible_context
from jspec.objectives.soft_labels import read_teacher, soft_labels
from jspec.objectives.terms import Terms
from jspec_train.optimizer import adamw, learning_rate_schedule
from jspec_train.vocabulary import most_frequent

RTOL, ATOL = 1e-4, 2e-5
GRAD_RTOL, GRAD_ATOL = 1e-3, 1e-5
LOSSES = {None: "cross_entropy", "alpha": "lk_alpha", "lambda": "lk_lambda"}
CHUNK = 7  # rows at a time: fewer than a case has, and no divisor


@dataclasses.dataclass(frozen=True, kw_only=True)
class Start:
    """Everything that a case is computed from."""

    folder: Path
    meta: Mapping[str, Any]
    outputs: Mapping[str, np.ndarray]
    loaded: LoadedDrafter
    tables: Tables
    batch: TrainBatch
    lengths: np.ndarray  # tokens of each row

    @property
    def config(self) -> Any:
        """Of the drafter."""
        return self.loaded.drafter.config

    def close(self, name: str, ours: Any, theirs: Any, rtol: float = RTOL, atol: float = ATOL) -> None:
        """Within the tolerance for forward values."""
        name = f"{self.folder.name} {name}"
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=rtol, atol=atol, err_msg=name)

    def same(self, name: str, ours: Any, theirs: Any) -> None:
        """Integers and masks."""
        np.testing.assert_array_equal(np.asarray(ours), theirs, err_msg=f"{self.folder.name} {name}")


def run_eagle3_training(folder: Path) -> None:
    """Rollouts of every row where states are recorded; the loss, metrics of each depth, all gradients."""
    start = _start(folder)
    objective = _objective3(start)
    if "depth0.logits" in start.outputs:
        _check_depths(start, objective)
    terms = _check_loss(start, objective, None)
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


def run_eagle3_updates(folder: Path) -> None:
    """Several updates: learning rates, losses, gradient norms and the weights at the end."""
    start = _start(folder)
    meta, outputs = start.meta, start.outputs
    total = len(outputs["losses"])
    schedule = learning_rate_schedule(
        meta["scheduler"],
        peak=meta["lr"],
        total_steps=meta["total_steps"],
        warmup_steps=int(meta["warmup_ratio"] * meta["total_steps"]),
    )
    start.close("lrs", [schedule(step) for step in range(total)], outputs["lrs"])
    objective = _objective3(start, _start(_weights(folder).parent).meta)
    optimizer = adamw(schedule, max_grad_norm=meta["max_grad_norm"])
    trained, join = _trainable(start, ("draft_ids", "embedding"))
    state = optimizer.init(trained)

    @jax.jit
    def update(trained: Any, state: Any) -> Any:
        def loss(trained: Any) -> Any:
            return objective.terms(join(trained), start.tables, start.batch).loss()

        value, grads = jax.value_and_grad(loss)(trained)
        changes, state = optimizer.update(grads, state, trained)
        return optax.apply_updates(trained, changes), state, value, optax.tree.norm(grads)

    for step in range(total):
        trained, state, loss, norm = update(trained, state)
        start.close(f"loss of update {step}", loss, outputs["losses"][step], rtol=2e-4)
        start.close(f"gradient norm of update {step}", norm, outputs["grad_norms"][step], rtol=1e-3)
    final = {name.removeprefix("final."): v for name, v in outputs.items() if name.startswith("final.")}
    compared = _compare(start, join(trained), final, rtol=0, atol=2e-4)
    assert compared == len(final), (
        f"{folder.name}: {len(final)} weights are recorded, {compared} were compared"
    )


def run_eagle_training(folder: Path) -> None:
    """Feature regression and token term, and greedy decoding with the same weights where it is recorded."""
    start = _start(folder)
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
    terms = _check_loss(start, objective, objective.choose(start.batch, jax.random.key(0)))
    metrics = terms.metrics
    for name, ours in (("vloss", "feature_loss"), ("ploss", "cross_entropy")):
        start.close(name, metrics[ours][0] / metrics[ours][1], outputs[name])
    start.close("correct", metrics["accuracy"][0], outputs["correct"])
    start.close("count", metrics["accuracy"][1], outputs["count"])
    if "greedy.prefill_len" in outputs:
        run_eagle_greedy(folder)


def run_peagle_training(folder: Path) -> None:
    """The recorded rows: their mask, states, logits, the loss, counts of each depth and all gradients."""
    start = _start(folder)
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
    metrics = _check_loss(start, objective, sample).metrics
    correct, known = metrics["accuracy_of_drafted"]
    for depth in range(objective.depths):
        start.close(f"correct {depth}", correct[depth], outputs[f"position_{depth}_acc_sum"])
        start.close(f"known {depth}", known[depth], outputs[f"position_{depth}_acc_total"])
    start.close("full_acc_sum", np.sum(correct), outputs["full_acc_sum"])
    start.close("full_acc_total", np.sum(known), outputs["full_acc_total"])


def run_vocab_mapping(folder: Path) -> None:
    """Counts of supervised tokens to the mapping."""
    meta = json.loads((folder / "meta.json").read_text())
    inputs, outputs = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    counts = np.bincount(inputs["input_ids"][inputs["loss_mask"] > 0], minlength=meta["target_vocab_size"])
    np.testing.assert_array_equal(counts, outputs["counts"])
    ids = most_frequent(counts, meta["draft_vocab_size"])
    np.testing.assert_array_equal(differences_of_ids(ids), outputs["d2t"])
    np.testing.assert_array_equal(mask_of_ids(ids, meta["target_vocab_size"]), outputs["t2d"])


def _weights(folder: Path) -> Path:
    draft = find_part(folder, "draft")
    assert draft is not None, f"{folder.name}: no weights here or in the cases that its meta names"
    return draft


def _start(folder: Path) -> Start:
    meta, draft = json.loads((folder / "meta.json").read_text()), _weights(folder)
    loaded = _load(draft, load_file(draft / "model.safetensors"), meta)
    config = loaded.drafter.config
    values = json.loads((draft / "config.json").read_text())
    inputs_file, target_file = (
        find_part(folder, "inputs.safetensors"),
        find_part(folder, "target.safetensors"),
    )
    assert inputs_file is not None
    inputs = load_file(inputs_file)
    deepspec = values["architectures"] == [DEEPSPEC]
    if deepspec:  # its head is frozen, and the target's
        head = load_file(draft / "model.safetensors")["lm_head.weight"]
        states = [inputs["batch.target_hidden_states"], inputs["batch.target_last_hidden_states"]]
    else:
        assert target_file is not None
        head = load_file(target_file)["lm_head.weight"]
        states = [inputs[name] for name in ("batch.hidden_state", "batch.target") if name in inputs]
    if config.kind == "eagle":
        states = [inputs["batch.hidden_states"]]
    ids, lengths = _texts(inputs)
    index = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    batch = TrainBatch(
        ids=jnp.asarray(ids, jnp.int32),
        loss_mask=jnp.asarray(inputs["batch.loss_mask"] > 0),
        segments=jnp.asarray(index < lengths[:, None], jnp.int32),
        positions=jnp.asarray(index),
        features=jnp.asarray(np.concatenate(states, axis=2)),
    )
    tables: Tables = RecordedTables(embedding=jnp.zeros((1, 1)), head=jnp.asarray(head))
    draft_ids = eagle_net(config, loaded.params).draft_ids
    if draft_ids is not None:
        tables = draft_tables(tables, head.shape[1], draft_ids[...], config.decoder.vocab_size)
    return Start(
        folder=folder,
        meta=meta,
        outputs=load_file(folder / "outputs.safetensors"),
        loaded=loaded,
        tables=tables,
        batch=batch,
        lengths=lengths,
    )


def _load(draft: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> LoadedDrafter:
    values = json.loads((draft / "config.json").read_text())
    return eagle_from_tensors(
        values,
        Weights(where=f"{draft.parent.name}/draft", arrays=dict(arrays)),
        jnp.float32,
        num_target_layers=LAYERS,
        mask_token_id=meta.get("mask_token_id"),
        norm_output="specforge",
    )


def _texts(inputs: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Tokens as they are in the text, and how many each row has; EAGLE's batches are shifted already."""
    ids = np.zeros_like(inputs["batch.input_ids"])
    lengths = inputs["batch.attention_mask"].sum(axis=1)
    if "raw0.input_ids" not in inputs:
        return inputs["batch.input_ids"], lengths
    for row, length in enumerate(lengths):
        ids[row, :length] = inputs[f"raw{row}.input_ids"].reshape(-1)[:length]
    return ids, lengths


def _objective3(start: Start, base: Mapping[str, Any] | None = None) -> Eagle3Objective:
    meta = {**(base or {}), **start.meta}
    return Eagle3Objective(
        config=start.config,
        depths=meta["ttt_length"],
        decay=meta.get("ploss_decay", meta.get("step_loss_decay")),
        loss=LOSSES[meta.get("lk_loss_type")],
        kl_scale=meta.get("kl_scale", 1.0),
        kl_decay=meta.get("kl_decay", 1.0),
        normaliser="specforge",
        chunk=CHUNK,
    )


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


def _trainable(
    start: Start, frozen: tuple[str, ...] = ("draft_ids",)
) -> tuple[tuple[Any, ...], Callable[[Any], tuple[Any, ...]]]:
    """Params without the frozen ones, and a function that puts all together."""
    params = start.loaded.params
    leaves = eagle_leaves(start.config, jnp.dtype(jnp.float32))
    trained = [leaf.path not in frozen for leaf in leaves]

    def join(given: Any) -> tuple[Any, ...]:
        given = iter(given)
        return tuple(next(given) if kind else p for p, kind in zip(params, trained, strict=True))

    return tuple(p for p, kind in zip(params, trained, strict=True) if kind), join


def _check_loss(start: Start, objective: Any, chosen: Any) -> Terms:
    """Loss and gradients, of the features that the drafter reads as well."""
    trained, join = _trainable(start)
    own = start.config.features_size

    def loss(trained: Any, features: Any) -> Any:
        rest = start.batch.features[:, :, own:]
        batch = dataclasses.replace(start.batch, features=jnp.concatenate([features, rest], axis=2))
        terms = objective.terms(join(trained), start.tables, batch, chosen)
        return terms.loss(), terms

    function = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    (value, terms), grads = function(trained, start.batch.features[:, :, :own])
    start.close("loss", value, start.outputs["loss"])
    recorded = load_file(start.folder / "grads.safetensors")
    features = recorded.pop("__input__.hidden_state", None)
    if features is not None:
        start.close("features", grads[1], features, GRAD_RTOL, GRAD_ATOL)
    compared = _compare(start, join(grads[0]), recorded, GRAD_RTOL, GRAD_ATOL)
    assert compared == len(recorded), (
        f"{start.folder.name}: {len(recorded)} gradients are recorded, {compared} were compared"
    )
    return terms


def _compare(start: Start, ours: Any, recorded: Mapping[str, np.ndarray], rtol: float, atol: float) -> int:
    """Compares arrays under the names and in the layout of the checkpoint, as the reader brings them into ours."""
    draft = _weights(start.folder)
    stored = load_file(draft / "model.safetensors")
    kept = {
        name: recorded.get(name, np.full_like(array, np.nan) if array.dtype == np.float32 else array)
        for name, array in stored.items()
    }
    theirs = _load(draft, kept, start.meta).params
    compared = 0
    for leaf, mine, other in zip(
        eagle_leaves(start.config, jnp.dtype(jnp.float32)), ours, theirs, strict=True
    ):
        if leaf.path != "draft_ids" and not np.isnan(np.asarray(other)).any():
            compared += 1
            start.close(leaf.path, mine, other, rtol, atol)
    return compared
