"""A target from a Hugging Face folder: config.json and safetensors weights."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.leaves import Origin, Plan
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import decoder_leaves

# Leaf of a layer -> tensor of a layer. Gemma's four norms need other names than the usual two.
LAYER_NAMES = {
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "attention.query": "self_attn.q_proj.weight",
    "attention.key": "self_attn.k_proj.weight",
    "attention.value": "self_attn.v_proj.weight",
    "attention.output": "self_attn.o_proj.weight",
    "attention.query_bias": "self_attn.q_proj.bias",
    "attention.key_bias": "self_attn.k_proj.bias",
    "attention.value_bias": "self_attn.v_proj.bias",
    "attention.output_bias": "self_attn.o_proj.bias",
    "attention.query_norm": "self_attn.q_norm.weight",
    "attention.key_norm": "self_attn.k_norm.weight",
    "mlp.gate": "mlp.gate_proj.weight",
    "mlp.up": "mlp.up_proj.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.gate_bias": "mlp.gate_proj.bias",
    "mlp.up_bias": "mlp.up_proj.bias",
    "mlp.down_bias": "mlp.down_proj.bias",
}
_SANDWICH = {
    "attention_out_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "mlp_out_norm": "post_feedforward_layernorm.weight",
}
# Prefix of the text model's tensors -> name of its head; multimodal checkpoints have two layouts.
_PREFIXES = {
    "model.": "lm_head.weight",
    "language_model.model.": "language_model.lm_head.weight",
    "model.language_model.": "lm_head.weight",
}
_BUFFERS = r"\.rotary_emb\.(inv_freq|cos_cached|sin_cached)$"
_VISION = r"^(model\.)?(vision_tower|multi_modal_projector)\."


def hf_plan(config: DecoderConfig, names: Iterable[str]) -> Plan:
    """Which tensor every leaf comes from, given the names of all tensors."""
    names = set(names)
    prefix = next((p for p in _PREFIXES if f"{p}embed_tokens.weight" in names), "model.")
    head, table = _PREFIXES[prefix], f"{prefix}embed_tokens.weight"
    layer_names = LAYER_NAMES | (_SANDWICH if config.sandwich_norms else {})

    def origin(path: str, axes: tuple[str, ...]) -> Origin:
        if path == "embedding":
            return Origin(name=table)
        if path == "head":
            return Origin(name=table if config.tied_head else head, transposed=True)
        if path == "norm":
            name = f"{prefix}norm.weight"
        else:
            _, index, leaf = path.split(".", 2)
            name = f"{prefix}layers.{index}.{layer_names[leaf]}"
        is_gemma_norm = config.architecture == "gemma3" and path.endswith("norm")
        return Origin(name=name, transposed=len(axes) == 2, transform=_plus_one if is_gemma_norm else None)

    return Plan(
        origins={
            leaf.path: origin(leaf.path, leaf.axes) for leaf in decoder_leaves(config, jnp.dtype(jnp.float32))
        },
        copies=[(head, table)] if config.tied_head else [],
        ignored=_BUFFERS if prefix == "model." else f"{_BUFFERS}|{_VISION}",
    )


def _plus_one(values: np.ndarray) -> np.ndarray:
    """Gemma's norms are stored as w and applied as 1 + w."""
    return values.astype(np.float32) + np.float32(1)


def read_json(file: Path) -> Mapping[str, Any]:
    """A JSON object from a file.

    Raises:
      ValueError: if the file is missing or holds something else.
    """
    if not file.is_file():
        raise ValueError(f"path: expected {file.name} in {file.parent}, got none; is this a model's folder?")
    try:
        values = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: expected JSON, got {error}; download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{file}: expected a JSON object, got {type(values).__name__}")
    return values


def special_ids(folder: Path, config: Mapping[str, Any]) -> tuple[tuple[int, ...], int | None]:
    """End-of-text ids and the id that begins a text.

    `generation_config.json` decides where it states them, as in transformers' generate: chat models
    list their end-of-turn token only there.
    """
    text = config.get("text_config", {})
    sources: list[Mapping[str, Any]] = [config, text]
    if (folder / "generation_config.json").is_file():
        sources.insert(0, read_json(folder / "generation_config.json"))

    def first(key: str) -> Any:
        return next((source[key] for source in sources if source.get(key) is not None), None)

    eos, bos = first("eos_token_id"), first("bos_token_id")
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, list) else (eos,)
    return eos_ids, bos
