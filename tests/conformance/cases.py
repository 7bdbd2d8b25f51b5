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
    run_block_training,
    run_dflash2_objectives,
    run_dpace,
)
from conformance.data_cases import run_data_case
from conformance.dflash2_cases import (
    dflash2_names,
    run_dflash2_case,
    run_dflash2_infer,
    run_selector_conv,
)
from conformance.dflash_cases import dflash_names, run_dflash_case
from conformance.eagle_cases import run_eagle3
from conformance.eagle_training_cases import (
    run_eagle3_training,
    run_eagle_training,
    run_peagle_training,
    run_vocab_mapping,
)
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
from conformance.sequential_cases import (
    dspark_names,
    run_domino_rollout,
    run_dspark_case,
    run_markov_sample,
)
from conformance.sequential_training_cases import run_domino_training, run_dspark_training
from conformance.target_cases import run_target_case
from conformance.training_records import find_part
from conformance.tree_cases import run_grammar_tree, run_greedy_trees, run_tree_build, run_tree_sampling
from conformance.update_cases import run_block_updates, run_eagle3_updates, run_optimizer
from conformance.verify_cases import run_chain_rejection, run_greedy_chain, run_target_probs

from jspec.checkpoints.dflash_config import ARCHITECTURE, ARCHITECTURE_2
from jspec.checkpoints.dflash_config import DEEPSPEC as DEEPSPEC_DSPARK
from jspec.checkpoints.eagle_config import DEEPSPEC, EAGLE, EAGLE3, PEAGLE, architecture_of
from jspec.checkpoints.sequential_config import DOMINO, DSPARK


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
    if {"d2t", "t2d", "counts"} <= outputs:
        return run_vocab_mapping
    eagle = eagle_check(path, outputs)
    if eagle is not None:
        return eagle
    architecture = draft_architecture(path)
    if "block_keep_mask" in outputs and architecture in ([DSPARK], [DEEPSPEC_DSPARK]):
        return run_dspark_training
    if "block_keep_mask" in outputs and architecture == [DOMINO]:
        return run_domino_training
    if architecture not in ([ARCHITECTURE], [ARCHITECTURE_2]):
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


def eagle_check(path: Path, outputs: set[str]) -> Callable[[Path], None] | None:
    """The check of a case whose drafter is an EAGLE's, EAGLE-3's or P-EAGLE's."""
    kind = architecture_of({"architectures": draft_architecture(path)})
    if kind == EAGLE and {"loss", "vloss"} <= outputs:
        return run_eagle_training
    if kind == PEAGLE and "anchor_pos" in outputs:
        return run_peagle_training
    if kind in (EAGLE3, DEEPSPEC) and {"losses", "grad_norms"} <= outputs:
        return run_eagle3_updates
    return run_eagle3_training if kind in (EAGLE3, DEEPSPEC) and "loss" in outputs else None


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
        "a_tree_build": run_tree_build,
        "b_greedy_verify": run_greedy,
        "b_tree_sampling_target_only": run_tree_sampling,
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
        "x_domino_rollout": run_domino_rollout,
        "x_markov_sample": run_markov_sample,
        "x_grammar_tree": run_grammar_tree,
        "x_target_probs": run_target_probs,
    }
    if kind in known:
        return known[kind]
    name = kind.removeprefix("g_eagle3_")
    if name != kind and (serve / "g_configs.json").is_file():
        return lambda folder: run_eagle3(folder, name)
    name = kind.removeprefix("f_")
    if name != kind and (serve / "f_configs.json").is_file() and name in dflash_names(serve):
        return lambda folder: run_dflash_case(folder, name)
    if name != kind and (serve / "f_configs.json").is_file() and name in dflash2_names(serve):
        return lambda folder: run_dflash2_case(folder, name)
    if name != kind and (serve / "f_configs.json").is_file() and name in dspark_names(serve):
        return lambda folder: run_dspark_case(folder, name)
    return None


def run_greedy(folder: Path) -> None:
    """Chains, and the trees of the file beside it."""
    run_greedy_chain(folder)
    run_greedy_trees(folder)


def tensor_names(path: Path) -> set[str]:
    """Names in a safetensors file, from its header alone."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        return set(json.loads(file.read(length)))
