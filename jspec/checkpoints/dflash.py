"""DFlash, DFlash 2, DSpark and Domino drafters from the public formats: config.json and safetensors weights.

Read are the layouts of SpecForge and SGLang, of the `speculators` library (DFlash and DFlash 2), and of
DeepSpec.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec.checkpoints.dflash_config import copies_of_the_target, read_config
from jspec.checkpoints.dflash_tensors import dflash_name, dflash_origins, target_hidden_size
from jspec.checkpoints.draft_vocabulary import check_ids, check_vocabulary_file
from jspec.checkpoints.hf_target import read_json
from jspec.checkpoints.leaves import Plan, TensorFile, check_tensors, read_leaves
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.checkpoints.plain_tensors import PlainTensors
from jspec.checkpoints.safetensors_files import open_safetensors
from jspec.drafters.dflash import DFlash, dflash, dflash_leaves, dflash_net
from jspec.drafters.dflash2 import dflash2
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.dflash_tree import dflash_tree
from jspec.drafters.domino import domino
from jspec.drafters.dspark import dspark
from jspec.drafters.tree_shape import TreeShape
from jspec.targets.decoder import decoder_units, with_kv_copies


def load_dflash(
    path: str | Path,
    dtype: DTypeLike,
    draft_length: int | None = None,
    mesh: Mesh | None = None,
    tree: TreeShape | None = None,
    *,
    replicated: bool = False,
) -> LoadedDrafter[DFlash]:
    """Loads a drafter with a DFlash backbone from a folder; its architecture says of which method.

    Args:
      path: folder with config.json and safetensors files.
      dtype: of the weights; norms and base kernels stay float32.
      draft_length: see `jspec.drafters.dflash.dflash`.
      mesh: splits weights by `jspec.sharding`, as the target's; None = the default device.
      tree: for DFlash, a shape to draft instead of a chain; see `jspec.drafters.dflash_tree.dflash_tree`.
      replicated: every device of the mesh gets the whole drafter instead.

    Raises:
      ValueError: naming the file and the key or tensor that is missing, unknown, damaged or not
        supported.
    """
    path = Path(path)
    values = read_json(path / "config.json")
    loaded = dflash_from_tensors(
        values, open_safetensors(path), dtype, draft_length, mesh, tree, replicated=replicated
    )
    config = loaded.drafter.config
    ids = dflash_net(config, loaded.params).draft_ids
    if ids is not None:
        check_vocabulary_file(path, np.asarray(ids[...]), config.decoder.vocab_size)
    return loaded


def dflash_from_tensors(
    values: Mapping[str, Any],
    file: TensorFile,
    dtype: DTypeLike,
    draft_length: int | None = None,
    mesh: Mesh | None = None,
    tree: TreeShape | None = None,
    *,
    replicated: bool = False,
) -> LoadedDrafter[DFlash]:
    """Builds a drafter from a parsed config.json and its open weights; see `load_dflash`."""
    try:
        own, decoder = read_config(values)
    except ValueError as error:
        raise ValueError(f"config.json for {file.where}: {error}") from error
    origins = dflash_origins(decoder, own["head"])
    tensors = PlainTensors.of(file, decoder, {origin.name for origin in origins.values()}, dflash_name)
    config = DFlashConfig(
        decoder=decoder,
        target_hidden_size=target_hidden_size(tensors, len(own["target_layer_ids"])),
        own_embedding=origins["embedding"].name in tensors.shapes,
        **own,
    )
    drafter = drafter_of(config, draft_length, tree)
    leaves = dflash_leaves(config, jnp.dtype(dtype))
    plan = Plan(
        origins={leaf.path: origins[leaf.path] for leaf in leaves}, ignored=copies_of_the_target(values)
    )
    check_tensors(config.identity, leaves, plan, tensors)
    if config.draft_vocab_size is not None:
        check_ids(np.asarray(tensors.read("draft_ids")), decoder.vocab_size, f"{tensors.where}, 'draft_ids'")
    decoder = with_kv_copies(dataclasses.replace(decoder, replicated=replicated), mesh)
    config = dataclasses.replace(config, decoder=decoder)
    leaves = dflash_leaves(config, jnp.dtype(dtype))
    return LoadedDrafter(
        drafter=dataclasses.replace(drafter, config=config),
        params=read_leaves(leaves, plan, tensors, decoder_units(decoder), mesh, replicated=replicated),
    )


def drafter_of(
    config: DFlashConfig, draft_length: int | None = None, tree: TreeShape | None = None
) -> DFlash:
    """The drafter of the method that the config is one of, with the method's defaults.

    Raises:
      ValueError: draft_length out of range, both of it and a tree, or a method that drafts no trees.
    """
    if tree is not None:
        if draft_length is not None:
            raise ValueError(
                f"draft_length: expected None with a tree, which has its own, got {draft_length}; leave it out"
            )
        return dflash_tree(config, tree)
    make = {"DFlash": dflash, "DSpark": dspark, "Domino": domino}.get(config.method, dflash)
    return (dflash2 if config.selector is not None else make)(config, draft_length=draft_length)
