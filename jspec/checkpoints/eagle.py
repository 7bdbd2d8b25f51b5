"""EAGLE, EAGLE-3 and P-EAGLE drafters from the public checkpoint formats.

Read are the layouts of SafeAILab, SpecForge, SGLang, DeepSpec and the `speculators` library.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec.checkpoints.draft_vocabulary import check_vocabulary_file
from jspec.checkpoints.eagle_config import EagleSettings, Meaning, read_eagle_config
from jspec.checkpoints.eagle_tensors import IGNORED, eagle_origin, known_names, names_only_layer, plain_name
from jspec.checkpoints.eagle_vocabulary import checked_ids
from jspec.checkpoints.hf_target import read_json
from jspec.checkpoints.leaves import Plan, TensorFile, check_tensors, read_leaves
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.checkpoints.plain_tensors import PlainTensors
from jspec.checkpoints.safetensors_files import open_safetensors
from jspec.drafters.eagle import Eagle, eagle
from jspec.drafters.eagle_init import default_layer_ids
from jspec.drafters.eagle_net import EagleConfig, eagle_leaves, eagle_net
from jspec.drafters.tree_shape import TreeShape
from jspec.features import layer_outputs
from jspec.net import Leaf
from jspec.targets.decoder import decoder_units, with_kv_copies


def load_eagle(
    path: str | Path,
    dtype: DTypeLike,
    *,
    draft_length: int | None = None,
    tree: TreeShape | None = None,
    mesh: Mesh | None = None,
    num_target_layers: int | None = None,
    mask_token_id: int | None = None,
    norm_output: Meaning | None = None,
    replicated: bool = False,
) -> LoadedDrafter[Eagle]:
    """Loads an EAGLE, EAGLE-3 or P-EAGLE drafter from a folder; its config says which.

    Args:
      path: folder with config.json and safetensors files.
      dtype: of the weights; norms stay float32.
      draft_length: see `jspec.drafters.eagle.eagle`.
      tree: see there.
      mesh: splits weights by `jspec.sharding`, as the target's; None = the default device.
      num_target_layers: of the target; needed where the config does not name the captured layers, since
        the usual ones depend on it.
      mask_token_id: of P-EAGLE, where the config does not state it.
      norm_output: whose meaning the config's key of that name has: "specforge" (the head reads the normed
        state) or "sglang" (the normed state is fed back). None = SpecForge's where the layer is called
        `midlayer`, else SGLang's.
      replicated: every device of the mesh gets the whole drafter instead.

    Raises:
      ValueError: naming the file and the key or tensor that is missing, unknown, damaged or not
        supported.
    """
    path = Path(path)
    loaded = eagle_from_tensors(
        read_json(path / "config.json"),
        open_safetensors(path),
        dtype,
        draft_length=draft_length,
        tree=tree,
        mesh=mesh,
        num_target_layers=num_target_layers,
        mask_token_id=mask_token_id,
        norm_output=norm_output,
        replicated=replicated,
    )
    config = loaded.drafter.config
    ids = eagle_net(config, loaded.params).draft_ids
    if ids is not None:
        check_vocabulary_file(path, np.asarray(ids[...]), config.decoder.vocab_size)
    return loaded


def eagle_from_tensors(
    values: Mapping[str, Any],
    file: TensorFile,
    dtype: DTypeLike,
    *,
    draft_length: int | None = None,
    tree: TreeShape | None = None,
    mesh: Mesh | None = None,
    num_target_layers: int | None = None,
    mask_token_id: int | None = None,
    norm_output: Meaning | None = None,
    replicated: bool = False,
) -> LoadedDrafter[Eagle]:
    """Builds a drafter from a parsed config.json and its open weights; see `load_eagle`."""
    settings, tensors, config = _read(values, file, num_target_layers, mask_token_id, norm_output)
    leaves = eagle_leaves(config, jnp.dtype(dtype))
    check_vocabulary(config, tensors)
    plan = _plan(config, settings, leaves, tensors)
    check_tensors(config.identity, leaves, plan, tensors)
    decoder = with_kv_copies(dataclasses.replace(config.decoder, replicated=replicated), mesh)
    config = dataclasses.replace(config, decoder=decoder)
    leaves = eagle_leaves(config, jnp.dtype(dtype))
    return LoadedDrafter(
        drafter=eagle(config, draft_length=draft_length, tree=tree),
        params=read_leaves(leaves, plan, tensors, decoder_units(decoder), mesh, replicated=replicated),
    )


def eagle_drafter(
    values: Mapping[str, Any],
    file: TensorFile,
    *,
    draft_length: int | None = None,
    tree: TreeShape | None = None,
    num_target_layers: int | None = None,
) -> Eagle:
    """The drafter without its weights; of the file only names and shapes are looked at. See `load_eagle`."""
    _, _, config = _read(values, file, num_target_layers)
    return eagle(config, draft_length=draft_length, tree=tree)


def _read(
    values: Mapping[str, Any],
    file: TensorFile,
    num_target_layers: int | None,
    mask_token_id: int | None = None,
    norm_output: Meaning | None = None,
) -> tuple[EagleSettings, PlainTensors, EagleConfig]:
    try:
        settings = read_eagle_config(values)
    except ValueError as error:
        raise ValueError(f"config.json for {file.where}: {error}") from error
    tensors = _flat_mask(
        PlainTensors.of(file, settings.decoder, known_names(settings.decoder, file), plain_name)
    )
    try:
        config = eagle_config(
            settings,
            tensors,
            num_target_layers=num_target_layers,
            mask_token_id=mask_token_id,
            norm_output=norm_output or ("specforge" if names_only_layer(file.shapes) else "sglang"),
        )
    except ValueError as error:
        raise ValueError(f"config.json for {file.where}: {error}") from error
    return settings, tensors, config


def eagle_config(
    settings: EagleSettings,
    tensors: TensorFile,
    *,
    num_target_layers: int | None,
    mask_token_id: int | None,
    norm_output: Meaning,
) -> EagleConfig:
    """The config of a drafter, from what its config.json and the shapes of its tensors say.

    Args:
      settings: of the config.json.
      tensors: under plain names.
      num_target_layers: see `load_eagle`, as for the next two.
      mask_token_id: where the settings have none.
      norm_output: whose meaning the key has.

    Raises:
      ValueError: the two contradict each other, or something that neither says is not given.
    """
    names = set(tensors.shapes)
    own_embedding = "embed_tokens.weight" in names
    if settings.tied and settings.draft_vocab_size is not None:
        raise ValueError(
            f"tie_word_embeddings: expected false with draft_vocab_size {settings.draft_vocab_size}, got true; "
            "an embedding of the whole vocabulary is no head of a reduced one"
        )
    own_head = own_embedding if settings.tied else "lm_head.weight" in names
    eagle3 = settings.kind == "eagle3"
    features, target_layers = ("final_norm",), settings.num_target_layers
    if eagle3:
        num_states = _fused_states(settings, tensors)
        layer_ids = settings.layer_ids
        if layer_ids is None:
            target_layers = target_layers or num_target_layers
            layer_ids = _usual_layers(num_states, target_layers)
        features = layer_outputs(layer_ids)
    stated = settings.norm_output
    return EagleConfig(
        kind=settings.kind,
        decoder=settings.decoder,
        features=features,
        target_hidden_size=settings.target_hidden_size,
        num_target_layers=target_layers,
        fc_bias="fc.bias" in names if settings.fc_bias is None else settings.fc_bias,
        own_embedding=own_embedding,
        own_head=own_head,
        draft_vocab_size=settings.draft_vocab_size,
        feature_norms=settings.feature_norms,
        norm_before_fc=settings.norm_before_fc,
        head_reads_norm=eagle3 and (norm_output == "sglang" or stated is not False),
        feeds_back_norm=eagle3 and norm_output == "sglang" and stated is True,
        norm_before_residual=settings.norm_before_residual,
        wide_layers=settings.wide_layers,
        mask_token_id=_mask_token_id(settings, names, mask_token_id),
    )


def check_vocabulary(config: EagleConfig, tensors: TensorFile) -> None:
    """Refuses d2t and t2d that are no mapping to the drafted ids.

    Raises:
      ValueError: naming the tensor and the numbers.
    """
    shapes, vocab_size = tensors.shapes, config.decoder.vocab_size
    drafted = config.draft_vocab_size
    if "d2t" not in shapes:
        if drafted is not None:
            raise ValueError(
                f"{tensors.where}: expected tensor 'd2t' for {drafted} of {vocab_size} ids, got none; without it "
                "nobody knows which ids are drafted"
            )
        return
    tensors.check_type("d2t", integer=True)
    mask = np.asarray(tensors.read("t2d")) if "t2d" in shapes else None
    checked_ids(tensors.where, tensors.read("d2t"), mask, drafted or vocab_size, vocab_size)


def _fused_states(settings: EagleSettings, tensors: TensorFile) -> int:
    """How many captured states fc fuses."""
    shape, size = tensors.shapes.get("fc.weight", ()), settings.target_hidden_size
    stated = settings.num_states
    if len(shape) == 2 and shape[1] % size == 0 and stated in (None, shape[1] // size):
        return shape[1] // size
    wanted = "captured states" if stated is None else f"{stated} captured states"
    width = f"a multiple of {size}" if stated is None else f"{stated} x {size} = {stated * size}"
    raise ValueError(
        f"fc.weight: expected {wanted} of target_hidden_size {size}, so {width} columns, got shape "
        f"{list(shape) or 'none'}; config and weights do not belong together"
    )


def _usual_layers(num_states: int, num_target_layers: int | None) -> tuple[int, ...]:
    if num_states != 3:
        raise ValueError(
            f"eagle_aux_hidden_state_layer_ids: expected {num_states} layers inside eagle_config, as fc fuses so "
            "many states, got none; only three have usual places"
        )
    if num_target_layers is None:
        raise ValueError(
            "eagle_aux_hidden_state_layer_ids: expected the captured layers inside eagle_config, got none; add "
            "them, or pass num_target_layers for the usual ones"
        )
    return default_layer_ids(num_target_layers)


def _mask_token_id(settings: EagleSettings, names: set[str], given: int | None) -> int | None:
    stated = settings.mask_token_id
    if not settings.parallel and "mask_hidden" not in names:
        if stated is not None or given is not None:
            raise ValueError(
                f"mask_token_id: expected none without a tensor 'mask_hidden', got "
                f"{given if stated is None else stated}; this is no P-EAGLE drafter"
            )
        return None
    if stated is not None and given is not None and stated != given:
        raise ValueError(f"mask_token_id: expected the config's {stated} or None, got {given}")
    if stated is None and given is None:
        raise ValueError(
            "mask_token_id: expected the id that stands for unknown tokens, got none; add it to the config, or "
            "pass mask_token_id"
        )
    return given if stated is None else stated


def _plan(
    config: EagleConfig, settings: EagleSettings, leaves: Sequence[Leaf], tensors: PlainTensors
) -> Plan:
    origins = {leaf.path: eagle_origin(leaf, tensors.shapes) for leaf in leaves}
    copies = []
    if settings.tied and config.own_head:
        copies = [(origins["head"].name, origins["embedding"].name)]
        origins["head"] = dataclasses.replace(origins["embedding"], transposed=True)
    whole = config.draft_vocab_size is None
    return Plan(origins=origins, copies=copies, ignored=f"{IGNORED}|^d2t$" if whole else IGNORED)


def _flat_mask(tensors: PlainTensors) -> PlainTensors:
    """mask_hidden is stored with axes of length one in front."""
    shape = tensors.shapes.get("mask_hidden")
    if shape is None:
        return tensors
    return dataclasses.replace(tensors, shapes={**tensors.shapes, "mask_hidden": (math.prod(shape),)})
