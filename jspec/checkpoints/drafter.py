"""A drafter from a folder, of whichever method its config.json is of."""

from pathlib import Path

from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec.checkpoints import dflash_config, eagle_config
from jspec.checkpoints.dflash import load_dflash
from jspec.checkpoints.draft_vocabulary import read_draft_vocabulary
from jspec.checkpoints.eagle import load_eagle
from jspec.checkpoints.hf_target import read_json
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.drafters.dflash import DFlash
from jspec.drafters.eagle import Eagle
from jspec.drafters.tree_shape import TreeShape


def load_drafter(
    path: str | Path,
    dtype: DTypeLike,
    *,
    draft_length: int | None = None,
    tree: TreeShape | None = None,
    mesh: Mesh | None = None,
    num_target_layers: int | None = None,
    tokenizer: str | None = None,
    replicated: bool = False,
) -> LoadedDrafter[DFlash] | LoadedDrafter[Eagle]:
    """Loads an EAGLE, EAGLE-3, P-EAGLE, DFlash, DFlash 2, DSpark or Domino drafter.

    Args:
      path: folder with config.json and safetensors files.
      dtype: of the weights; norms stay float32.
      draft_length: draft tokens per round of a chain or block; None = the method's own.
      tree: for EAGLE and DFlash drafters, a shape to draft instead of a chain.
      mesh: splits weights as the target's; None = the default device.
      replicated: every device of the mesh gets the whole drafter instead, which then runs without
        collectives.
      num_target_layers: of the target, for EAGLE-3 checkpoints that do not name their captured layers.
      tokenizer: identity of the target's: the ids of a reduced vocabulary that was trained here mean
        something with the tokenizer alone that they were counted with. None = not checked.

    Raises:
      ValueError: another method or tokenizer, or something in the folder that is missing, unknown or damaged.
    """
    vocabulary = read_draft_vocabulary(Path(path))
    if vocabulary is not None and tokenizer is not None:
        vocabulary.check_tokenizer(tokenizer)
    values = read_json(Path(path) / "config.json")
    if eagle_config.architecture_of(values) is not None:
        return load_eagle(
            path,
            dtype,
            draft_length=draft_length,
            tree=tree,
            mesh=mesh,
            num_target_layers=num_target_layers,
            replicated=replicated,
        )
    if not dflash_config.is_dflash(values):
        kinds = ", ".join((*eagle_config.ARCHITECTURES, *dflash_config.ARCHITECTURES))
        stated = values.get("speculators_model_type") or values.get("architectures")
        raise ValueError(
            f"{Path(path) / 'config.json'}: expected a drafter of one of the architectures {kinds} (or another "
            f"name of theirs, or a speculators_model_type), got {stated}; this one is not supported"
        )
    return load_dflash(path, dtype, draft_length, mesh, tree, replicated=replicated)
