"""DFlash drafters in the public checkpoint format: config.json and safetensors weights.

The layers are Qwen3's, so their part of the config is read as a Qwen3 model's, with the same
strictness; what DFlash adds stands at the top level or under `dflash_config`.
"""

import dataclasses
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from jspec.checkpoints.hf_config import config_from_hf
from jspec.checkpoints.hf_target import hf_plan, read_json
from jspec.checkpoints.leaves import Origin, Plan, TensorFile, check_tensors, read_leaves
from jspec.checkpoints.safetensors_files import open_safetensors
from jspec.drafters.dflash import DFlash, dflash, dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.net import Params
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import decoder_units

ARCHITECTURE = "DFlashDraftModel"
# Keys of DFlash itself, and keys that other methods added to the format: their maths is not here.
_OWN = frozenset({"block_size", "target_layer_ids", "mask_token_id", "num_target_layers", "is_causal"})
_REFUSED: dict[str, tuple[Any, ...]] = {
    "projector_type": (None, "dflash"),
    "sample_from_anchor": (None, False),
}
# Training settings, a name for the mask token, and code to run: no part of the maths.
_IGNORED = frozenset({"mask_token", "num_anchors", "loss_decay_gamma", "auto_map"})
_ALIASES = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}
# Leaf -> tensor, outside of the layers.
_OUTER = {
    "fc": Origin(name="fc.weight", transposed=True),
    "hidden_norm": Origin(name="hidden_norm.weight"),
    "norm": Origin(name="norm.weight"),
    "embedding": Origin(name="embed_tokens.weight"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedDrafter:
    """A drafter with its weights."""

    drafter: DFlash
    params: Params


def load_dflash(
    path: str | Path, dtype: DTypeLike, draft_length: int | None = None, mesh: Mesh | None = None
) -> LoadedDrafter:
    """Loads a DFlash drafter from a folder.

    Args:
      path: folder with config.json and safetensors files.
      dtype: of the weights; norms stay float32.
      draft_length: see `jspec.drafters.dflash.dflash`.
      mesh: splits weights by `jspec.sharding`, as the target's; None = the default device.

    Raises:
      ValueError: naming the file and the key or tensor that is missing, unknown, damaged or not
        supported.
    """
    path = Path(path)
    values = read_json(path / "config.json")
    return dflash_from_tensors(values, open_safetensors(path), dtype, draft_length, mesh)


def dflash_from_tensors(
    values: Mapping[str, Any],
    file: TensorFile,
    dtype: DTypeLike,
    draft_length: int | None = None,
    mesh: Mesh | None = None,
) -> LoadedDrafter:
    """Builds a drafter from a parsed config.json and its open weights; see `load_dflash`."""
    try:
        own, decoder = read_config(values)
    except ValueError as error:
        raise ValueError(f"config.json for {file.where}: {error}") from error
    origins = _origins(decoder)
    tensors = _Tensors.of(file, decoder, {origin.name for origin in origins.values()})
    config = DFlashConfig(
        decoder=decoder,
        target_hidden_size=_target_hidden_size(tensors, len(own["target_layer_ids"])),
        own_embedding=origins["embedding"].name in tensors.shapes,
        **own,
    )
    drafter = dflash(config, draft_length=draft_length)
    leaves = dflash_leaves(config, jnp.dtype(dtype))
    plan = Plan(origins={leaf.path: origins[leaf.path] for leaf in leaves})
    check_tensors(config.identity, leaves, plan, tensors)
    return LoadedDrafter(
        drafter=drafter, params=read_leaves(leaves, plan, tensors, decoder_units(decoder), mesh)
    )


def read_config(values: Mapping[str, Any]) -> tuple[dict[str, Any], DecoderConfig]:
    """DFlash's own settings, as fields of `DFlashConfig`, and the settings of its layers.

    Raises:
      ValueError: on another architecture, or a key that is missing, unknown or contradictory.
    """
    if values.get("architectures") != [ARCHITECTURE]:
        raise ValueError(
            f"architectures: expected [{ARCHITECTURE!r}], got {values.get('architectures')}; "
            "other drafters (DFlash 2, DSpark, Domino, EAGLE) are not supported yet"
        )
    nested = values.get("dflash_config") or {}
    if not isinstance(nested, Mapping):
        raise ValueError(f"dflash_config: expected a JSON object, got {nested!r}")
    unknown = sorted(set(nested) - _OWN - _IGNORED - set(_REFUSED))
    if unknown:
        raise ValueError(
            f"dflash_config: expected no key {unknown[0]!r}, got {nested[unknown[0]]!r}; "
            "it may change the maths: remove it only if you know that it does not"
        )

    def take(key: str) -> Any:
        inside, outside = nested.get(key), values.get(key)
        if inside is not None and outside is not None and inside != outside:
            raise ValueError(
                f"{key}: expected one value, got {inside} in dflash_config and {outside} beside it"
            )
        return outside if inside is None else inside

    for key, allowed in _REFUSED.items():
        if take(key) not in allowed:
            raise ValueError(f"{key}: expected {allowed[-1]!r} or none, got {take(key)!r}; not supported yet")
    layer_ids = take("target_layer_ids")
    if not isinstance(layer_ids, list) or not layer_ids or not all(_is_int(i, -1) for i in layer_ids):
        raise ValueError(
            f"target_layer_ids: expected a list of 0-based layers (-1 = the embedding), got {layer_ids!r}; "
            "add the ones that the drafter was trained on: there is no safe default"
        )
    is_causal = take("is_causal")
    if is_causal is not None and not isinstance(is_causal, bool):
        raise ValueError(f"is_causal: expected true, false or null, got {is_causal!r}")
    decoder = _decoder(values)
    num_target_layers = take("num_target_layers")
    return (
        dict(
            block_size=_integer("block_size", take("block_size"), 2, None),
            mask_token_id=_integer("mask_token_id", take("mask_token_id"), 0, decoder.vocab_size - 1),
            target_layer_ids=tuple(layer_ids),
            num_target_layers=None
            if num_target_layers is None
            else _integer("num_target_layers", num_target_layers, 1, None),
            is_causal=is_causal,
        ),
        decoder,
    )


def _decoder(values: Mapping[str, Any]) -> DecoderConfig:
    """The layers' settings, read as those of a Qwen3 model."""
    added = _OWN | _IGNORED | set(_REFUSED) | {"dflash_config", "architectures"}
    qwen = {key: value for key, value in values.items() if key not in added}
    if qwen.setdefault("model_type", "qwen3") != "qwen3":
        raise ValueError(f"model_type: expected 'qwen3', got {qwen['model_type']!r}; not supported yet")
    kinds = qwen.get("layer_types")
    if kinds is None and qwen.get("use_sliding_window"):
        raise ValueError(
            "layer_types: expected the kind of every layer with use_sliding_window, got none; add it"
        )
    if kinds is None:
        qwen["layer_types"] = ["full_attention"] * qwen.get("num_hidden_layers", 0)
    qwen.setdefault("use_sliding_window", "sliding_attention" in (kinds or ()))
    qwen["tie_word_embeddings"] = False  # it has no head to tie
    return config_from_hf(qwen)


def _integer(key: str, value: Any, low: int, high: int | None) -> int:
    if _is_int(value, low) and (high is None or value <= high):
        return value
    wanted = f"an integer from {low} on" if high is None else f"an integer from {low} to {high}"
    raise ValueError(f"{key}: expected {wanted}, got {value!r}; the checkpoint's config has to state it")


def _is_int(value: Any, low: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= low


@dataclasses.dataclass(frozen=True)
class _Tensors:
    """A `TensorFile` of the known tensors under one name each: no `model.` prefix, no aliases, nothing fused.

    What nobody knows keeps the name that it is stored under.
    """

    file: TensorFile
    places: Mapping[str, tuple[str, slice]]  # name -> tensor in the file and its rows
    shapes: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, file: TensorFile, decoder: DecoderConfig, known: Set[str]) -> "_Tensors":
        query, key = decoder.num_heads * decoder.head_size, decoder.num_kv_heads * decoder.head_size
        parts = {
            "qkv_proj": (("q_proj", query), ("k_proj", key), ("v_proj", key)),
            "gate_up_proj": (
                ("gate_proj", decoder.intermediate_size),
                ("up_proj", decoder.intermediate_size),
            ),
        }
        places: dict[str, tuple[str, slice]] = {}
        shapes: dict[str, tuple[int, ...]] = {}

        def add(name: str, stored: str, rows: slice, shape: tuple[int, ...]) -> None:
            if name in places:
                raise ValueError(
                    f"{file.where}: expected one tensor for {name!r}, got {places[name][0]!r} and {stored!r}"
                )
            places[name], shapes[name] = (stored, rows), shape

        for stored, shape in file.shapes.items():
            name = stored.removeprefix("model.")
            name = _ALIASES.get(name, name)
            owner, _, last = name.rpartition(".")[0].rpartition(".")
            names = [f"{owner}.{part}.{name.rpartition('.')[2]}" for part, _ in parts.get(last, ())]
            if not names or not known >= set(names):
                add(name if name in known else stored, stored, slice(None), shape)
                continue
            total = sum(rows for _, rows in parts[last])
            if not shape or shape[0] != total:
                inside = ", ".join(f"{part} {rows}" for part, rows in parts[last])
                raise ValueError(
                    f"{file.where}: expected {total} rows in tensor {stored!r} ({inside}), "
                    f"got shape {list(shape)}; config and weights do not belong together"
                )
            start = 0
            for name, (_, rows) in zip(names, parts[last], strict=True):
                add(name, stored, slice(start, start + rows), (rows, *shape[1:]))
                start += rows
        return cls(file, places, shapes)

    @property
    def where(self) -> str:
        return self.file.where

    def check_type(self, name: str) -> None:
        self.file.check_type(self.places[name][0])

    def read(self, name: str) -> np.ndarray:
        stored, rows = self.places[name]
        return self.file.read(stored)[rows]


def _target_hidden_size(tensors: _Tensors, num_states: int) -> int:
    shape = tensors.shapes.get("fc.weight", ())
    if len(shape) != 2 or shape[1] % num_states:
        raise ValueError(
            f"{tensors.where}: expected 'fc.weight' of shape [hidden, {num_states} x target's hidden], "
            f"as there are {num_states} target_layer_ids, got {list(shape) or 'none'}; "
            "config and weights do not belong together"
        )
    return shape[1] // num_states


def _origins(decoder: DecoderConfig) -> dict[str, Origin]:
    """Which tensor every leaf comes from that a drafter with these layers may have."""
    layers = {
        path: dataclasses.replace(origin, name=origin.name.removeprefix("model."))
        for path, origin in hf_plan(decoder, ()).origins.items()
        if path.startswith("layers.")
    }
    return layers | _OUTER
