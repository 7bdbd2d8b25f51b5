"""What is checked: a target, a drafter's folder and a folder of samples, opened as far as they open."""

import dataclasses
import json
from pathlib import Path

import jax.numpy as jnp

from jspec.checkpoints.drafter import load_drafter
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.checkpoints.target import LoadedTarget, load_target
from jspec.drafters.dflash import DFlash
from jspec.drafters.eagle import Eagle
from jspec.features import CONTRACT_FILE, FeatureContract
from jspec.loading import find, resolve
from jspec.net import Params
from jspec.objectives.frozen import FrozenTarget, Tables, draft_tables
from jspec.text.tokenizer import Tokenizer, load_tokenizer
from jspec_train.check.block_method import BlockMethod
from jspec_train.check.eagle_method import EagleMethod
from jspec_train.check.method import CheckedMethod
from jspec_train.samples import SampleSource, open_samples


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A target with its tokenizer, and a drafter that could be loaded or not."""

    loaded: LoadedTarget
    tokenizer: Tokenizer
    folder: Path  # of the drafter
    drafter: LoadedDrafter[DFlash] | LoadedDrafter[Eagle] | None  # float32; None: see `refusal`
    refusal: str  # why the drafter did not load
    source: SampleSource | None

    @property
    def method(self) -> CheckedMethod:
        """Of the drafter, if it loaded."""
        assert self.drafter is not None
        drafter = self.drafter.drafter
        return EagleMethod(drafter=drafter) if isinstance(drafter, Eagle) else BlockMethod(drafter=drafter)

    @property
    def drafter_params(self) -> Params:
        """Of the drafter, if it loaded."""
        assert self.drafter is not None
        return self.drafter.params

    @property
    def names(self) -> tuple[str, ...]:
        """The features that the drafter reads."""
        return self.method.names

    def tables(self) -> Tables:
        """Embedding and head as the drafter was trained with.

        Raises:
          ValueError: the drafter has a reduced vocabulary and the target caps its logits.
        """
        target = FrozenTarget(params=self.loaded.params, target=self.loaded.target)
        ids = self.method.draft_ids(self.drafter_params)
        if ids is None:
            return target
        return draft_tables(target, self.loaded.target.hidden_size, ids, self.loaded.target.vocab_size)


def open_subject(target: str, drafter: str, data: str | Path | None, dtype: str) -> Subject:
    """Opens everything. A drafter that does not load is a finding; all else has to open.

    Args:
      target: model folder, hub id or .gguf file.
      drafter: folder or hub id of an EAGLE, EAGLE-3, P-EAGLE, DFlash or DFlash 2 checkpoint.
      data: folder of prepared samples, with or without features; None = none.
      dtype: of the target. The drafter is float32, so that differences are not of rounding.

    Raises:
      FileNotFoundError, ValueError: target, data or the drafter's folder cannot be opened.
    """
    source = None if data is None else open_samples(data)
    folder = find("drafter", drafter)
    if folder is None or not folder.is_dir():
        raise FileNotFoundError(
            f"drafter: expected the folder or hub id of an EAGLE or DFlash checkpoint, got {drafter!r}; check the path"
        )
    path = resolve(target)
    tokenizer = load_tokenizer(path)
    loaded = load_target(path, dtype=dtype)
    opened, refusal = None, ""
    try:
        opened = load_drafter(
            folder,
            jnp.float32,
            num_target_layers=loaded.target.num_layers,
            tokenizer=tokenizer.identity,
        )
    except (ValueError, OSError) as problem:
        refusal = " ".join(str(problem).split())
    if opened is not None and opened.drafter.config.method in ("DSpark", "Domino"):
        raise ValueError(
            f"drafter: expected an EAGLE or DFlash drafter, got the {opened.drafter.config.method} in {folder}, whose "
            "sequential head `jspec check` has no steps for yet; `jspec evaluate` measures it"
        )
    return Subject(
        loaded=loaded, tokenizer=tokenizer, folder=folder, drafter=opened, refusal=refusal, source=source
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
