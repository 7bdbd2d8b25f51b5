"""Finds golden cases in a folder and says which check belongs to each.

Layout: DIR/train/<case>/ with meta.json and safetensors, DIR/serve/<kind>.json and .safetensors.
"""

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path

from conformance.block_training_cases import (
    DPACE,
    find_part,
    run_block_training,
    run_block_updates,
    run_dflash2_objectives,
    run_dpace,
    run_optimizer,
)
from conformance.data_cases import run_data_case
from conformance.dflash2_cases import (
    dflash2_names,
    run_dflash2_case,
    run_dflash2_infer,
    run_selector_conv,
)
from conformance.dflash_cases import dflash_names, run_dflash_case
from conformance.schedule_cases import (
    run_allotment,
    run_budget,
    run_cost_tables,
    run_cut_acceptance,
    run_layout,
    run_profiler,
    run_relay,
    run_temperature_fit,
    run_temperature_scaling,
)
from conformance.target_cases import run_target_case
from conformance.verify_cases import run_chain_rejection, run_greedy_chain, run_target_probs

from jspec.checkpoints.dflash import ARCHITECTURE, ARCHITECTURE_2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A case to run: `check(folder)` raises AssertionError if the arrays do not agree."""

    name: str
    folder: Path
    check: Callable[[Path], None]


def discover(folder: Path) -> tuple[list[Case], list[str]]:
    """The cases that this version runs, and the names of those it does not know yet.

    Raises:
      FileNotFoundError: there is neither a train nor a serve folder.
    """
    train, serve = folder / "train", folder / "serve"
    if not train.is_dir() and not serve.is_dir():
        raise FileNotFoundError(
            f"cases: expected {folder} to hold train/ or serve/, got neither; check the path"
        )
    cases, unknown = [], []
    for path in sorted(train.iterdir() if train.is_dir() else ()):
        if not path.is_dir():
            continue
        check = train_check(path)
        if check is None:
            unknown.append(path.name)
        else:
            cases.append(Case(name=path.name, folder=path, check=check))
    for kind in sorted({path.stem for path in serve.glob("*.*") if path.suffix in (".json", ".safetensors")}):
        if kind in ("f_configs", "g_configs", "fg_top1_gaps"):
            continue
        check = serve_check(serve, kind)
        if check is None:
            unknown.append(kind)
        else:
            cases.append(Case(name=kind, folder=serve, check=check))
    return cases, unknown


def train_check(path: Path) -> Callable[[Path], None] | None:
    """The check of a training case, by what its files hold; None if it is of a kind not supported yet."""
    if is_target_case(path):
        return run_target_case
    if (path / "cases.json").is_file() and (path / "tokenizer.json").is_file():
        return run_data_case
    if not (path / "meta.json").is_file() or not (path / "outputs.safetensors").is_file():
        return None
    meta, outputs = json.loads((path / "meta.json").read_text()), tensor_names(path / "outputs.safetensors")
    if "temperatures" in outputs:
        return run_temperature_fit
    if "adamw" in meta:
        return run_optimizer
    if draft_architecture(path) not in ([ARCHITECTURE], [ARCHITECTURE_2]):
        return None
    if {"losses", "grad_norms"} <= outputs:
        return run_block_updates
    if meta.get("loss_type") in DPACE:
        return run_dpace
    if "block_keep_mask" in outputs:
        return run_block_training
    if any(name.endswith(".block_ids") for name in outputs):
        return run_dflash2_infer
    if any(name.endswith(".loss_weights") for name in outputs):
        return run_dflash2_objectives
    return None


def draft_architecture(path: Path) -> list[str] | None:
    """What the config of a case's drafter says, its own or that of the sibling that its meta names."""
    draft = find_part(path, "draft")
    return None if draft is None else json.loads((draft / "config.json").read_text()).get("architectures")


def is_target_case(path: Path) -> bool:
    """A target model with its hidden states: what a drafter's case does not have."""
    outputs = path / "outputs.safetensors"
    return outputs.is_file() and "greedy_generation" in tensor_names(outputs)


def serve_check(serve: Path, kind: str) -> Callable[[Path], None] | None:
    """The check of a serve kind; of the f_ kinds by the architecture in their configuration."""
    known = {
        "b_greedy_verify": run_greedy_chain,
        "c_chain_rejection": run_chain_rejection,
        "d_accept": run_cut_acceptance,
        "d_budget": run_budget,
        "d_cost_tables": run_cost_tables,
        "d_layout": run_layout,
        "d_relay": run_relay,
        "d_schedule": run_allotment,
        "d_sts": run_temperature_scaling,
        "e_dflash2_selector_conv": run_selector_conv,
        "x_misc": run_profiler,
        "x_target_probs": run_target_probs,
    }
    if kind in known:
        return known[kind]
    name = kind.removeprefix("f_")
    if name != kind and (serve / "f_configs.json").is_file() and name in dflash_names(serve):
        return lambda folder: run_dflash_case(folder, name)
    if name != kind and (serve / "f_configs.json").is_file() and name in dflash2_names(serve):
        return lambda folder: run_dflash2_case(folder, name)
    return None


def tensor_names(path: Path) -> set[str]:
    """Names in a safetensors file, from its header alone."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return set(json.loads(file.read(length)))
