"""Drafters with a DFlash backbone to folders that SGLang, SpecForge, DeepSpec or `speculators` read."""

import dataclasses
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from safetensors.numpy import save_file

from jspec.checkpoints.dflash_config import ARCHITECTURE, ARCHITECTURE_2, read_config
from jspec.checkpoints.dflash_speculators import speculators_values
from jspec.checkpoints.dflash_tensors import dflash_origins
from jspec.checkpoints.hf_rope import rope_keys
from jspec.checkpoints.new_folder import new_folder
from jspec.checkpoints.safetensors_files import SINGLE
from jspec.checkpoints.sequential_config import DEEPSPEC, DOMINO, DSPARK, head_values, stated_block_size
from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.net import Params
from jspec.targets.config import DecoderConfig

Layout = Literal["sglang", "speculators", "deepspec"]
_ARCHITECTURES = {"DFlash": ARCHITECTURE, "DFlash 2": ARCHITECTURE_2, "DSpark": DSPARK, "Domino": DOMINO}
ACTIVATIONS = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}


def save_dflash(
    folder: str | Path,
    config: DFlashConfig,
    params: Params,
    *,
    dtype: DTypeLike | None = None,
    layout: Layout = "sglang",
    target_name: str | None = None,
    target_architectures: Sequence[str] = (),
    target_tensors: Mapping[str, np.ndarray] | None = None,
    files: Mapping[str, str] | None = None,
) -> None:
    """Writes a drafter as config.json and model.safetensors. The folder appears whole or not at all.

    `jspec.checkpoints.dflash.load_dflash` reads all layouts back: with the dtype they were written in,
    bit for bit. The target's embedding and head are in the files of layout "deepspec" only, and a drafter that is
    read from there has that embedding as its own.

    Args:
      folder: must not exist, or be empty.
      config: of the drafter.
      params: its leaves.
      dtype: of the matrices; norms and base kernels stay float32. None = as they are.
      layout: "sglang" for SGLang and SpecForge, "speculators" for that library and vLLM (DFlash, DFlash 2),
        "deepspec" for DeepSpec (DSpark).
      target_name: hub id or path of the target, for layout "speculators" only.
      target_architectures: of the target's config.json, likewise.
      target_tensors: "embed_tokens.weight" and "lm_head.weight" of the target, [vocabulary, hidden], for layout
        "deepspec" only, which keeps copies of them beside the drafter.
      files: further text files of the folder, by name.

    Raises:
      ValueError: the folder exists, the layout cannot hold the config, or the params are not its leaves.
    """
    leaves = dflash_leaves(config, jnp.dtype(jnp.float32 if dtype is None else dtype))
    if [leaf.shape for leaf in leaves] != [array.shape for array in params]:
        raise ValueError(
            f"params: expected {len(leaves)} arrays of ({config.identity}), got {len(params)} or other "
            "shapes; pass the ones that belong to the config"
        )
    matrices = params[0].dtype if dtype is None else jnp.dtype(dtype)
    values = config_values(config, matrices.name)
    copies = dict(target_tensors or {})
    if copies and layout != "deepspec":
        raise ValueError(f"target_tensors: expected none for layout {layout}, got {sorted(copies)}")
    if layout == "deepspec":
        values = _deepspec_values(config, values)
        _check_copies(config, copies)
    if layout == "speculators":
        if config.method not in ("DFlash", "DFlash 2"):
            raise ValueError(
                f"config: expected DFlash or DFlash 2 for layout speculators, got ({config.identity}); write sglang"
            )
        if config.draft_vocab_size is not None:
            raise ValueError(
                f"config.draft_vocab_size: expected None for layout speculators, got {config.draft_vocab_size}; "
                "there, a reduced vocabulary brings a head of its own"
            )
        if config.own_embedding:
            raise ValueError(
                "config.own_embedding: expected False for layout speculators, got True; the library would "
                "put the target's embedding in its place"
            )
        values = speculators_values(values, target_name, target_architectures)
    elif target_name is not None or target_architectures:
        raise ValueError(f"target_name: expected none for layout {layout}, got {target_name!r}")
    check_config(config, values)
    origins = dflash_origins(config.decoder, config.head)
    tensors: dict[str, np.ndarray] = {
        name: np.ascontiguousarray(array).astype(matrices) for name, array in copies.items()
    }
    for leaf, array in zip(leaves, params, strict=True):
        origin = origins[leaf.path]
        held = np.asarray(array if dtype is None else array.astype(leaf.dtype))
        tensors[origin.name] = np.ascontiguousarray(held.T if origin.transposed else held)
    write_drafter(folder, tensors, values, files)


def write_drafter(
    folder: str | Path,
    tensors: Mapping[str, np.ndarray],
    values: Mapping[str, Any],
    files: Mapping[str, str] | None,
) -> None:
    """Writes a drafter's folder, which appears whole or not at all.

    Args:
      folder: must not exist, or be empty.
      tensors: by name.
      values: of config.json.
      files: further text files, by name.

    Raises:
      ValueError: the folder exists, or a file has the name of one of ours.
    """
    extra = dict(files or {})
    if {"config.json", SINGLE} & set(extra):
        raise ValueError(f"files: expected other names than config.json and {SINGLE}, got {sorted(extra)}")
    with new_folder(Path(folder)) as hidden:
        # transformers refuses files that do not say which framework wrote them.
        save_file(dict(sorted(tensors.items())), hidden / SINGLE, metadata={"format": "pt"})
        config = hidden / "config.json"
        config.write_text(json.dumps(values, indent=2, sort_keys=True) + "\n")
        shutil.copymode(config, hidden / SINGLE)  # safetensors lets only the owner read, whatever the umask
        for name, text in extra.items():
            (hidden / name).write_text(text)


def config_values(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """The config.json of a drafter in the layout of SGLang and SpecForge.

    Args:
      config: of the drafter.
      dtype: name of the weights' dtype.

    Raises:
      ValueError: a rope rule that the format does not have.
    """
    own: dict[str, Any] = {
        "block_size": stated_block_size(config),
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
    }
    if config.convolution is not None:
        own["conv_kernel_size"] = config.convolution.taps
        own["conv_group_size"] = config.convolution.group_size
    if config.selector is not None:
        own["selector_rank"] = config.selector.rank
        own["selector_top_k"] = config.selector.top_k
    if config.draft_vocab_size is not None:
        own["draft_vocab_size"] = config.draft_vocab_size
    if config.output_multiplier != 1.0:
        own["output_multiplier"] = config.output_multiplier
    if config.final_softcap is not None:
        own["final_logit_softcapping"] = config.final_softcap
    heads = head_values(config)
    values = _layer_values(config.decoder) | {
        "architectures": [_ARCHITECTURES[config.method]],
        "block_size": own["block_size"],
        "dflash_config": own | heads,
        "dtype": dtype,
    }
    stated = {
        "is_causal": config.is_causal,
        "num_target_layers": config.num_target_layers,
        "sample_from_anchor": config.anchor_predicts or None,
    }
    # SGLang looks for the heads' keys beside dflash_config, SpecForge inside.
    return values | {key: value for key, value in stated.items() if value is not None} | heads


def _deepspec_values(config: DFlashConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings with everything at the top, as DeepSpec keeps them."""
    if config.method != "DSpark" or not config.anchor_predicts or config.draft_vocab_size is not None:
        raise ValueError(
            "config: expected a DSpark drafter of the whole vocabulary whose anchor predicts for layout deepspec, "
            f"got ({config.identity}); write sglang"
        )
    flat = {**values, **values["dflash_config"], "architectures": [DEEPSPEC]}
    for key in ("dflash_config", "projector_type", "sample_from_anchor"):
        del flat[key]
    return flat


def _check_copies(config: DFlashConfig, copies: Mapping[str, np.ndarray]) -> None:
    shape = (config.decoder.vocab_size, config.decoder.hidden_size)
    wanted = {"lm_head.weight"} if config.own_embedding else {"lm_head.weight", "embed_tokens.weight"}
    if set(copies) != wanted or any(array.shape != shape for array in copies.values()):
        raise ValueError(
            f"target_tensors: expected {' and '.join(sorted(wanted))} of shape {list(shape)} for layout deepspec, "
            f"got { ({name: list(array.shape) for name, array in copies.items()}) }; pass the target's"
        )


def check_config(config: DFlashConfig, values: Mapping[str, Any]) -> None:
    """Makes sure that a written config means this drafter and no other.

    Raises:
      ValueError: naming the field that would read back as something else.
    """
    own, decoder = read_config(values)
    read = DFlashConfig(
        decoder=decoder,
        target_hidden_size=config.target_hidden_size,
        own_embedding=config.own_embedding,
        **own,
    )
    for wanted, got in ((_essence(config), _essence(read)), (_layers(config), _layers(read))):
        for name, value in wanted.items():
            if got[name] != value:
                raise ValueError(
                    f"config.{name}: expected a value that the format can say, got {value}, which would "
                    f"read back as {got[name]}; change it"
                )


def _essence(config: DFlashConfig) -> dict[str, Any]:
    """What the drafter does, apart from its layers."""
    fields = {f.name: getattr(config, f.name) for f in dataclasses.fields(config)}
    del fields["decoder"]
    kinds = sorted(set(config.decoder.layer_kinds))
    return fields | {"is_causal": [(kind, config.causal(kind)) for kind in kinds]}


def _layers(config: DFlashConfig) -> dict[str, Any]:
    """What the layers do: neither the target's side of a `DecoderConfig` nor what no layer uses."""
    decoder = config.decoder
    fields = {f.name: getattr(decoder, f.name) for f in dataclasses.fields(decoder)}
    for name in ("architecture", "tied_head", "embedding_scale", "final_softcap"):
        del fields[name]
    windows = "window" in decoder.layer_kinds
    return fields | {
        "window": decoder.window if windows else None,
        "window_rope": decoder.rope("window") if windows else None,
    }


def _layer_values(decoder: DecoderConfig) -> dict[str, Any]:
    kinds = {"full": "full_attention", "window": "sliding_attention"}
    windows = "window" in decoder.layer_kinds
    return {
        "attention_bias": decoder.qkv_bias,
        "attention_dropout": 0.0,
        "head_dim": decoder.head_size,
        "hidden_act": ACTIVATIONS[decoder.activation],
        "hidden_size": decoder.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": decoder.intermediate_size,
        "layer_types": [kinds[kind] for kind in decoder.layer_kinds],
        "max_position_embeddings": decoder.max_context,
        "max_window_layers": decoder.num_layers,
        "model_type": "qwen3",
        "num_attention_heads": decoder.num_heads,
        "num_hidden_layers": decoder.num_layers,
        "num_key_value_heads": decoder.num_kv_heads,
        "rms_norm_eps": decoder.norm_eps,
        **rope_keys(decoder),
        "sliding_window": decoder.window if windows else None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "use_sliding_window": windows,
        "vocab_size": decoder.vocab_size,
    }
