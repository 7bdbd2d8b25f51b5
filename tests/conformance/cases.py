"""Finds golden cases in a folder and says which check belongs to each.

Layout: DIR/train/<case>/ with meta.json and safetensors, DIR/serve/<kind>.json and .safetensors.
"""

import dataclasses
import json
import struct
from collections.abc import Callable
from pathlib import Path

from conformance.block_training_cases import (
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
from conformance.target_cases import run_target_case
from conformance.verify_cases import run_chain_rejection, run_greedy_chain, run_target_probs


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
    """The check of a training case: a target, or by what its name begins with."""
    if is_target_case(path):
        return run_target_case
    known = {
        "dflash_dpace": run_dpace,
        "dflash_train": run_block_updates,
        "dflash2_infer": run_dflash2_infer,
        "dflash2_objectives": run_dflash2_objectives,
        "dflash2_train": run_block_training,
        "dflash_": run_block_training,
        "optimizer_": run_optimizer,
        "data_": run_data_case,
    }
    return next((check for prefix, check in known.items() if path.name.startswith(prefix)), None)


def is_target_case(path: Path) -> bool:
    """A target model with its hidden states: what a drafter's case does not have."""
    outputs = path / "outputs.safetensors"
    return outputs.is_file() and "greedy_generation" in tensor_names(outputs)


def serve_check(serve: Path, kind: str) -> Callable[[Path], None] | None:
    """The check of a serve kind; of the f_ kinds by the architecture in their configuration."""
    known = {
        "b_greedy_verify": run_greedy_chain,
        "c_chain_rejection": run_chain_rejection,
        "e_dflash2_selector_conv": run_selector_conv,
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
