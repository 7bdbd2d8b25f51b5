"""What the training cases of EAGLE, EAGLE-3 and P-EAGLE have recorded: start, loss, gradients and weights."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance.dflash_cases import Weights
from conformance.eagle_cases import LAYERS
from conformance.training_records import (
    ATOL,
    GRAD_ATOL,
    GRAD_RTOL,
    RTOL,
    RecordedTables,
    meta_of,
    part_of,
)
from safetensors.numpy import load_file

from jspec.checkpoints.eagle import eagle_from_tensors
from jspec.checkpoints.eagle_config import DEEPSPEC
from jspec.checkpoints.hf_target import read_json
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.drafters.eagle_net import eagle_leaves, eagle_net
from jspec.objectives.batch import TrainBatch
from jspec.objectives.eagle3 import Eagle3Objective
from jspec.objectives.frozen import Tables, draft_tables
from jspec.objectives.terms import Terms

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


def start_of(folder: Path) -> Start:
    """What a case and the siblings that it names have recorded."""
    meta, draft = meta_of(folder), part_of(folder, "draft")
    loaded = load_arrays(draft, load_file(draft / "model.safetensors"), meta)
    config = loaded.drafter.config
    values = read_json(draft / "config.json")
    inputs = load_file(part_of(folder, "inputs.safetensors"))
    deepspec = values["architectures"] == [DEEPSPEC]
    if deepspec:  # its head is frozen, and the target's
        head = load_file(draft / "model.safetensors")["lm_head.weight"]
        states = [inputs["batch.target_hidden_states"], inputs["batch.target_last_hidden_states"]]
    else:
        head = load_file(part_of(folder, "target.safetensors"))["lm_head.weight"]
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


def load_arrays(draft: Path, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> LoadedDrafter:
    """A drafter of given tensors, named and laid out as in the checkpoint in `draft`."""
    values = read_json(draft / "config.json")
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


def eagle3_objective(start: Start, base: Mapping[str, Any] | None = None) -> Eagle3Objective:
    """The loss that a case's meta describes, with that of `base` where it says nothing."""
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


def trainable(
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


def check_loss(start: Start, objective: Any, chosen: Any) -> Terms:
    """Loss and gradients, of the features that the drafter reads as well."""
    trained, join = trainable(start)
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
    compared = compare_leaves(start, join(grads[0]), recorded, GRAD_RTOL, GRAD_ATOL)
    assert compared == len(recorded), (
        f"{start.folder.name}: {len(recorded)} gradients are recorded, {compared} were compared"
    )
    return terms


def compare_leaves(
    start: Start, ours: Any, recorded: Mapping[str, np.ndarray], rtol: float, atol: float
) -> int:
    """Compares arrays under the names and in the layout of the checkpoint, as the reader brings them into ours."""
    draft = part_of(start.folder, "draft")
    stored = load_file(draft / "model.safetensors")
    kept = {
        name: recorded.get(name, np.full_like(array, np.nan) if array.dtype == np.float32 else array)
        for name, array in stored.items()
    }
    theirs = load_arrays(draft, kept, start.meta).params
    compared = 0
    for leaf, mine, other in zip(
        eagle_leaves(start.config, jnp.dtype(jnp.float32)), ours, theirs, strict=True
    ):
        if leaf.path != "draft_ids" and not np.isnan(np.asarray(other)).any():
            compared += 1
            start.close(leaf.path, mine, other, rtol, atol)
    return compared
