"""What is checked: a target, a drafter's folder and a folder of samples, opened as far as they open."""

import dataclasses
import json
from pathlib import Path
from typing import cast

import jax.numpy as jnp

from jspec.checkpoints.drafter import load_drafter
from jspec.checkpoints.eagle_config import architecture_of
from jspec.checkpoints.hf_target import read_json
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.checkpoints.target import LoadedTarget, load_target
from jspec.drafters.dflash import DFlash, dflash_net
from jspec.drafters.dflash_net import DFlashConfig
from jspec.features import CONTRACT_FILE, FeatureContract, layer_outputs
from jspec.loading import find, resolve
from jspec.net import Params
from jspec.objectives.dflash import DFlashObjective, SelectorTerm
from jspec.objectives.frozen import FrozenTarget, Tables, draft_tables
from jspec.text.tokenizer import Tokenizer, load_tokenizer
from jspec_train.samples import SampleSource, open_samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A target with its tokenizer, and a drafter that could be loaded or not."""

    loaded: LoadedTarget
    tokenizer: Tokenizer
    folder: Path  # of the drafter
    drafter: LoadedDrafter[DFlash] | None  # float32; None: see `refusal`
    refusal: str  # why the drafter did not load
    source: SampleSource | None

    @property
    def config(self) -> DFlashConfig:
        """Of the drafter, if it loaded."""
        assert self.drafter is not None
        return self.drafter.drafter.config

    @property
    def drafter_params(self) -> Params:
        """Of the drafter, if it loaded."""
        assert self.drafter is not None
        return self.drafter.params

    @property
    def names(self) -> tuple[str, ...]:
        """The features that the drafter reads."""
        return layer_outputs(self.config.target_layer_ids)

    def tables(self) -> Tables:
        """Embedding and head as the drafter was trained with.

        Raises:
          ValueError: the drafter has a reduced vocabulary and the target caps its logits.
        """
        target = FrozenTarget(params=self.loaded.params, target=self.loaded.target)
        if self.config.draft_vocab_size is None:
            return target
        ids = dflash_net(self.config, self.drafter_params).draft_ids
        assert ids is not None
        return draft_tables(target, self.loaded.target.hidden_size, ids[...], self.loaded.target.vocab_size)

    def objective(self) -> DFlashObjective:
        """The training loss of the drafter's backbone.

        Raises:
          ValueError: it is of a kind that is not trained this way.
        """
        return DFlashObjective(config=self.config, chunk_blocks=16, selector=SelectorTerm(alpha=0.0))


def open_subject(target: str, drafter: str, data: str | Path | None, dtype: str) -> Subject:
    """Opens everything. A drafter that does not load is a finding; all else has to open.

    Args:
      target: model folder, hub id or .gguf file.
      drafter: folder or hub id of a DFlash or DFlash 2 checkpoint.
      data: folder of prepared samples, with or without features; None = none.
      dtype: of the target. The drafter is float32, so that differences are not of rounding.

    Raises:
      FileNotFoundError, ValueError: target, data or the drafter's folder cannot be opened.
    """
    source = None if data is None else open_samples(data)
    folder = find("drafter", drafter)
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(
            f"drafter: expected the folder or hub id of a DFlash checkpoint, got {drafter!r}; check the path"
        )
    _check_method(folder)
    path = resolve(target)
    tokenizer = load_tokenizer(path)
    loaded = load_target(path, dtype=dtype)
    opened, refusal = None, ""
    try:
        opened = cast(LoadedDrafter[DFlash], load_drafter(folder, jnp.float32, tokenizer=tokenizer.identity))
    except (ValueError, OSError) as problem:
        refusal = " ".join(str(problem).split())
    if opened is not None and opened.drafter.config.method not in ("DFlash", "DFlash 2"):
        raise _other_method(opened.drafter.config.method, folder)
    return Subject(
        loaded=loaded, tokenizer=tokenizer, folder=folder, drafter=opened, refusal=refusal, source=source
    )


def _check_method(folder: Path) -> None:
    """The steps are written for DFlash: another method's folder is no fault of theirs."""
    config = folder / "config.json"
    architecture = architecture_of(read_json(config)) if config.is_file() else None
    if architecture is not None:
        raise _other_method(architecture, folder)


def _other_method(method: str, folder: Path) -> ValueError:
    return ValueError(
        f"drafter: expected a DFlash or DFlash 2 drafter, got the {method} in {folder}, which `jspec check` "
        "has no steps for yet; `jspec evaluate` measures it"
    )


def read_contract(folder: Path) -> FeatureContract | None:
    """The contract that an exported drafter carries; None if there is none.

    Raises:
      ValueError: the file is no contract.
    """
    path = folder / CONTRACT_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text("utf-8"))
        return FeatureContract(
            names=tuple(values["names"]),
            width=values["width"],
            dtype=values["dtype"],
            target=values["target"],
        )
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{path}: expected the fields names, width, dtype and target, got another file ({problem!r}); "
            "export the drafter again"
        ) from problem
