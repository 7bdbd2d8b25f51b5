"""Runs a golden `target_*` case: a tiny target as transformers computes it.

Format: `draft/` holds the model (config.json, model.safetensors), `inputs.safetensors` right-padded
`input_ids` and `attention_mask`, `meta.json` the layer ids that the feature arrays were taken from.
hidden_states.0 is the embedding, .i the output of layer i - 1, the last one the final norm's output;
layer id k of a drafter is hidden_states[k + 1].
"""

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file
from target_chain import continue_greedily, run_chain

from jspec.checkpoints.target import load_target

RTOL, ATOL = 1e-4, 2e-5  # of the cases' README


def run_target_case(folder: Path) -> None:
    """Raises AssertionError where the loaded target departs from the case's arrays."""
    meta = json.loads((folder / "meta.json").read_text())
    inputs = load_file(folder / "inputs.safetensors")
    outputs = load_file(folder / "outputs.safetensors")
    loaded = load_target(folder / "draft", dtype="float32")
    target, params = loaded.target, loaded.params
    names = ("embedding", *(f"layer.{i}" for i in range(target.num_layers - 1)), "final_norm")
    taken = {"eagle3_aux": meta["eagle3_layer_ids"]} | {
        key.replace("_layer_ids_", ""): ids
        for key, ids in meta.items()
        if key.startswith("dflash_layer_ids_")
    }
    checked = {f"hidden_states.{i}" for i in range(target.num_layers + 1)} & set(outputs)
    checked |= {"last_hidden_post_norm", "logits", "greedy_generation"} | (set(taken) & set(outputs))
    assert checked == set(outputs), f"{folder}: no check for {sorted(set(outputs) - checked)}"

    continued = 0
    lengths = inputs["attention_mask"].sum(axis=1).tolist()
    for row, length in enumerate(lengths):
        ids = inputs["input_ids"][row, :length].tolist()
        new = _generated(outputs["greedy_generation"], ids)
        run = run_chain(target, params, ids, capture=names, capacity=length + len(new))
        states = np.split(run.features, len(names), axis=1)
        got = {f"hidden_states.{i}": state for i, state in enumerate(states)}
        got |= {"last_hidden_post_norm": run.hidden, "logits": run.logits}
        for name, layer_ids in taken.items():
            got[name] = np.concatenate([states[i + 1] for i in layer_ids], axis=1)
        for name in checked - {"greedy_generation"}:
            np.testing.assert_allclose(
                got[name], outputs[name][row, :length], RTOL, ATOL, err_msg=f"{folder.name} row {row}: {name}"
            )
        if new:
            got_new = continue_greedily(target, params, run, len(new), names)
            assert got_new == new, f"{folder.name} row {row}: greedy tokens {got_new}, expected {new}"
            continued += 1
    assert continued == len(outputs["greedy_generation"]), (
        f"{folder}: a generation continues none of the inputs"
    )


def _generated(generations: np.ndarray, prompt: list[int]) -> list[int]:
    """The new tokens of the generation that begins with `prompt`; none if there is none."""
    return next((g[len(prompt) :] for g in generations.tolist() if g[: len(prompt)] == prompt), [])
