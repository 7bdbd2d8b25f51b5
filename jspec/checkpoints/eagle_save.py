"""EAGLE, EAGLE-3 and P-EAGLE drafters to folders that the public programs read."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jspec.checkpoints.dflash_save import ACTIVATIONS, write_drafter
from jspec.checkpoints.eagle import check_vocabulary, eagle_config
from jspec.checkpoints.eagle_config import DEEPSPEC, EAGLE, EAGLE3, PEAGLE, read_eagle_config
from jspec.checkpoints.eagle_speculators import speculators_values
from jspec.checkpoints.eagle_tensors import eagle_origin
from jspec.checkpoints.eagle_vocabulary import differences_of_ids, mask_of_ids
from jspec.checkpoints.hf_rope import rope_keys
from jspec.drafters.eagle import DRAFT_LENGTH
from jspec.drafters.eagle_net import EagleConfig, eagle_leaves
from jspec.net import Params
from jspec.targets.config import DecoderConfig

Layout = Literal["eagle", "sglang", "specforge", "deepspec", "peagle", "speculators"]
_ARCHITECTURES: dict[Layout, str] = {
    "eagle": EAGLE,
    "sglang": EAGLE3,
    "specforge": EAGLE3,
    "deepspec": DEEPSPEC,
    "peagle": PEAGLE,
}


def layout_of(config: EagleConfig) -> Layout:
    """The layout that a drafter is written in where nobody says which."""
    if config.kind == "eagle":
        return "eagle"
    if config.mask_token_id is not None:
        return "peagle"
    one_layer = config.decoder.num_layers == 1
    wide = config.wide_layers == "all" and not one_layer
    if config.draft_vocab_size is None and (wide or (config.decoder.query_key_norm and one_layer)):
        return "deepspec"
    return "sglang" if config.head_reads_norm else "specforge"


def save_eagle(
    folder: str | Path,
    config: EagleConfig,
    params: Params,
    *,
    dtype: DTypeLike | None = None,
    layout: Layout | None = None,
    target_name: str | None = None,
    target_architectures: Sequence[str] = (),
    files: Mapping[str, str] | None = None,
) -> None:
    """Writes a drafter as config.json and model.safetensors. The folder appears whole or not at all.

    `jspec.checkpoints.eagle.load_eagle` reads every layout back: with the dtype it was written in, bit
    for bit. The target's embedding and head are in the files only if the drafter has its own.

    Args:
      folder: must not exist, or be empty.
      config: of the drafter.
      params: its leaves.
      dtype: of the matrices; norms stay float32. None = as they are.
      layout: "eagle" (SafeAILab's EAGLE, read by SGLang too), "sglang" or "specforge" (EAGLE-3), "deepspec",
        "peagle" (SpecForge's), "speculators" (that library and vLLM; EAGLE-3 and P-EAGLE); None = `layout_of`.
      target_name: hub id or path of the target, for layout "speculators" only.
      target_architectures: of the target's config.json, likewise.
      files: further text files of the folder, by name.

    Raises:
      ValueError: the folder exists, the layout cannot hold the config, or the params are not its leaves.
    """
    layout = layout_of(config) if layout is None else layout
    if layout not in get_args(Layout):
        raise ValueError(f"layout: expected one of {', '.join(get_args(Layout))}, got {layout!r}")
    if layout != "speculators" and (target_name is not None or target_architectures):
        raise ValueError(f"target_name: expected none for layout {layout}, got {target_name!r}")
    leaves = eagle_leaves(config, jnp.dtype(jnp.float32 if dtype is None else dtype))
    if [leaf.shape for leaf in leaves] != [array.shape for array in params]:
        raise ValueError(
            f"params: expected {len(leaves)} arrays of ({config.identity}), got {len(params)} or other "
            "shapes; pass the ones that belong to the config"
        )
    held = {
        leaf.path: (leaf, np.asarray(array if dtype is None else array.astype(leaf.dtype)))
        for leaf, array in zip(leaves, params, strict=True)
    }
    tensors: dict[str, np.ndarray] = {}
    for path, (leaf, array) in held.items():
        origin = eagle_origin(leaf, ())
        if path == "draft_ids":
            tensors["d2t"] = differences_of_ids(array)
            tensors["t2d"] = mask_of_ids(array, config.decoder.vocab_size)
        elif path == "mask_hidden":
            tensors[origin.name] = array[None, None]
        else:
            tensors[origin.name] = np.ascontiguousarray(array.T if origin.transposed else array)
    values = config_values(config, layout, held["fc"][1].dtype.name, target_name, target_architectures)
    check_config(config, layout, values, tensors)
    if _only_layer(config, layout):
        tensors = {name.replace("layers.0.", "midlayer.", 1): array for name, array in tensors.items()}
    write_drafter(folder, tensors, values, files)


def check_savable(config: EagleConfig, layout: Layout | None = None) -> None:
    """Makes sure that a drafter can be written, before there is anything to lose.

    Raises:
      ValueError: naming the field that the layout cannot say.
    """
    layout = layout_of(config) if layout is None else layout
    tensors: dict[str, np.ndarray] = {}
    for leaf in eagle_leaves(config, jnp.dtype(jnp.float32)):
        origin = eagle_origin(leaf, ())
        shape = leaf.shape[::-1] if origin.transposed else leaf.shape
        tensors[origin.name] = np.broadcast_to(np.zeros((), np.int64), shape)  # any ids: the first ones
    check_config(config, layout, config_values(config, layout, "float32"), tensors)


def config_values(
    config: EagleConfig,
    layout: Layout,
    dtype: str,
    target_name: str | None = None,
    target_architectures: Sequence[str] = (),
) -> dict[str, Any]:
    """The config.json of a drafter in a layout.

    Args:
      config: of the drafter.
      layout: of the folder.
      dtype: name of the weights' dtype.
      target_name: see `save_eagle`, as for the next.
      target_architectures: for layout "speculators".

    Raises:
      ValueError: a rope rule that the format does not have, or another method than the layout is for.
    """
    if layout == "speculators":
        _check_speculators(config)
        return speculators_values(
            config_values(config, "sglang" if config.mask_token_id is None else "peagle", dtype),
            draft_length=DRAFT_LENGTH,
            target_name=target_name,
            target_architectures=target_architectures,
        )
    values = _layer_values(config.decoder) | {"architectures": [_ARCHITECTURES[layout]], "dtype": dtype}
    if config.num_target_layers is not None:
        values["num_target_layers"] = config.num_target_layers
    if config.fc_bias or layout == "eagle":
        values["bias"] = config.fc_bias
    if layout == "eagle":
        return values | ({"qkv_bias": True} if config.decoder.qkv_bias else {})
    ids = [-1 if name == "embedding" else int(name.partition(".")[2]) for name in config.features]
    if layout == "deepspec":
        values["target_layer_ids"] = ids
    else:
        values["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        values["draft_vocab_size"] = config.draft_vocab_size or config.decoder.vocab_size
        values["target_hidden_size"] = config.target_hidden_size
    norm_output = config.head_reads_norm if layout == "specforge" else config.feeds_back_norm
    # Left out where it says what everybody assumes: its two meanings have different defaults.
    if norm_output is not (layout == "specforge"):
        values["norm_output"] = norm_output
    stated = {
        "fc_norm": config.feature_norms,
        "norm_before_fc": config.norm_before_fc,
        "norm_before_residual": config.norm_before_residual,
    }
    values |= {key: value for key, value in stated.items() if value}
    return values | ({"mask_token_id": config.mask_token_id} if layout == "peagle" else {})


def check_config(
    config: EagleConfig, layout: Layout, values: Mapping[str, Any], tensors: Mapping[str, np.ndarray]
) -> None:
    """Makes sure that a written folder means this drafter and no other.

    Args:
      config: of the drafter.
      layout: of the folder.
      values: its config.json.
      tensors: under plain names.

    Raises:
      ValueError: naming the field that would read back as something else.
    """
    file = _Written(tensors)
    read = eagle_config(
        read_eagle_config(values),
        file,
        num_target_layers=None,
        mask_token_id=None,
        norm_output="specforge" if _only_layer(config, layout) else "sglang",
    )
    check_vocabulary(config, file)
    for mine, theirs in ((config, read), (config.decoder, read.decoder)):
        for field in dataclasses.fields(mine):
            wanted, got = getattr(mine, field.name), getattr(theirs, field.name)
            alike = field.name == "wide_layers" and config.decoder.num_layers == 1
            if field.name != "decoder" and wanted != got and not alike:
                raise ValueError(
                    f"config.{field.name}: expected a value that layout {layout} can say, got {wanted}, which "
                    f"would read back as {got}; change it, or take another layout"
                )


def _check_speculators(config: EagleConfig) -> None:
    if config.kind == "eagle":
        raise ValueError(
            f"config: expected EAGLE-3 or P-EAGLE for layout speculators, got ({config.identity}); write eagle"
        )
    if not config.own_head:
        raise ValueError(
            "config.own_head: expected True for layout speculators, got False; the library would train and serve a "
            "head of its own: write sglang"
        )


@dataclasses.dataclass(frozen=True)
class _Written:
    """Tensors that are about to be written, as an open checkpoint."""

    tensors: Mapping[str, np.ndarray]
    where: str = "the folder to write"

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: array.shape for name, array in self.tensors.items()}

    def check_type(self, name: str, *, integer: bool = False) -> None:
        """They are what they should be."""

    def read(self, name: str) -> np.ndarray:
        """The tensor."""
        return self.tensors[name]


def _only_layer(config: EagleConfig, layout: Layout) -> bool:
    """Whether the layer is called `midlayer`, so that norm_output has SpecForge's meaning."""
    return layout == "specforge" or (
        layout == "sglang" and config.decoder.num_layers == 1 and not config.feeds_back_norm
    )


def _layer_values(decoder: DecoderConfig) -> dict[str, Any]:
    windows: dict[str, Any] = {}
    if "window" in decoder.layer_kinds:
        kinds = {"full": "full_attention", "window": "sliding_attention"}
        windows = {
            "layer_types": [kinds[kind] for kind in decoder.layer_kinds],
            "sliding_window": decoder.window,
        }
        if decoder.architecture != "llama":
            windows |= {"use_sliding_window": True, "max_window_layers": decoder.num_layers}
    values: dict[str, Any] = {
        "attention_bias": decoder.output_bias,
        "attention_dropout": 0.0,
        "head_dim": decoder.head_size,
        "hidden_act": ACTIVATIONS[decoder.activation],
        "hidden_size": decoder.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": decoder.intermediate_size,
        "max_position_embeddings": decoder.max_context,
        "model_type": decoder.architecture,
        "num_attention_heads": decoder.num_heads,
        "num_hidden_layers": decoder.num_layers,
        "num_key_value_heads": decoder.num_kv_heads,
        "rms_norm_eps": decoder.norm_eps,
        **rope_keys(decoder),
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": decoder.vocab_size,
    }
    return values | windows | ({"mlp_bias": decoder.mlp_bias} if decoder.architecture == "llama" else {})
