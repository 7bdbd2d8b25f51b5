"""Targets and drafters from their configs alone: a plan needs no weights."""

import dataclasses
from pathlib import Path

import jax.numpy as jnp
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec.checkpoints.dflash import drafter_of
from jspec.checkpoints.dflash_config import is_dflash, read_config
from jspec.checkpoints.eagle import eagle_drafter
from jspec.checkpoints.eagle_config import architecture_of
from jspec.checkpoints.hf_config import config_from_hf
from jspec.checkpoints.hf_target import read_json
from jspec.checkpoints.safetensors_files import open_safetensors
from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.eagle_net import eagle_leaves
from jspec.drafters.ngram import ngram
from jspec.drafters.plain import plain
from jspec.drafters.tree_shape import TreeShape
from jspec.planning.rounds import DescribedDrafter
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import with_kv_copies


def planned_target(path: str | Path, mesh: Mesh | None = None) -> DecoderConfig:
    """The target that a config.json, or a folder with one, describes; on a mesh with copies of few KV heads.

    Raises:
      ValueError, FileNotFoundError: it is missing, or describes no model that can be served.
    """
    file = _config_file("target", path)
    try:
        return with_kv_copies(config_from_hf(read_json(file)), mesh)
    except ValueError as problem:
        raise ValueError(f"{file}: {problem}") from problem


def planned_drafter(
    name: str | Path,
    target: DecoderConfig,
    mesh: Mesh,
    dtype: DTypeLike,
    *,
    draft_length: int | None = None,
    tree: TreeShape | None = None,
) -> DescribedDrafter:
    """The drafter of that name, or one that a config describes.

    Args:
      name: "plain", "ngram", a config.json or a folder with one. That of an EAGLE drafter needs its
        safetensors files beside it: their headers say what the config does not.
      target: that it drafts for.
      mesh: splits its weights.
      dtype: of its weights.
      draft_length: see `jspec.load`.
      tree: see there.

    Raises:
      ValueError, FileNotFoundError: it is missing, or describes no drafter that can be served.
    """
    if name == "plain":
        return DescribedDrafter(drafter=plain(), leaves=(), decoder=None)
    if name == "ngram":
        drafter = ngram() if draft_length is None else ngram(draft_length=draft_length)
        return DescribedDrafter(drafter=drafter, leaves=(), decoder=None)
    file = _config_file("drafter", name)
    values = read_json(file)
    if architecture_of(values) is not None:
        drafter = eagle_drafter(
            values,
            open_safetensors(file.parent),
            draft_length=draft_length,
            tree=tree,
            num_target_layers=target.num_layers,
        )
        decoder = with_kv_copies(drafter.config.decoder, mesh)
        config = dataclasses.replace(drafter.config, decoder=decoder)
        leaves = eagle_leaves(config, jnp.dtype(dtype))
        return DescribedDrafter(
            drafter=dataclasses.replace(drafter, config=config), leaves=leaves, decoder=decoder
        )
    if not is_dflash(values):
        raise ValueError(
            f"{file}: expected the config of a DFlash, DFlash 2, DSpark, Domino or EAGLE drafter, got "
            f"{values.get('architectures')}; name another"
        )
    own = planned_dflash(file, target, mesh)
    return DescribedDrafter(
        drafter=drafter_of(own, draft_length, tree),
        leaves=dflash_leaves(own, jnp.dtype(dtype)),
        decoder=own.decoder,
    )


def planned_dflash(path: str | Path, target: DecoderConfig, mesh: Mesh | None = None) -> DFlashConfig:
    """The DFlash backbone that a config describes, which reads the target's embedding.

    Raises:
      ValueError, FileNotFoundError: it is missing, or describes no such drafter.
    """
    file = _config_file("drafter", path)
    try:
        own, decoder = read_config(read_json(file))
        return DFlashConfig(
            decoder=with_kv_copies(decoder, mesh), target_hidden_size=target.hidden_size, **own
        )
    except ValueError as problem:
        raise ValueError(f"{file}: {problem}") from problem


def _config_file(argument: str, path: str | Path) -> Path:
    file = Path(path).expanduser()
    file = file / "config.json" if file.is_dir() else file
    if not file.is_file():
        raise FileNotFoundError(
            f"{argument}: expected a config.json or a folder with one, got {str(path)!r}; check the path"
        )
    return file
