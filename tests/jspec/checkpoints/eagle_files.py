"""Tiny EAGLE drafters as the public programs write them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

VOCABULARY, DRAFTED, HIDDEN, TARGET_HIDDEN, INNER, HEADS, KV_HEADS, HEAD_SIZE = 24, 10, 8, 6, 12, 4, 2, 2
LAYERS = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_SIZE,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 64,
    "model_type": "llama",
    "rope_theta": 10000.0,
}
IDS = np.array([0, 2, 3, 5, 8, 9, 13, 20, 21, 23])


def config(**changes: Any) -> dict[str, Any]:
    """SpecForge's EAGLE-3, with layers named."""
    values = LAYERS | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": DRAFTED,
        "target_hidden_size": TARGET_HIDDEN,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]},
        "tie_word_embeddings": False,
        "pretraining_tp": 1,
    }
    return {key: value for key, value in (values | changes).items() if value is not ...}


def layer(
    name: str, inputs: int, *, norms: tuple[str, ...] = (), bare: bool = False
) -> dict[str, np.ndarray]:
    random = np.random.default_rng(len(name) + inputs)
    rows, kv_rows = HEADS * HEAD_SIZE, KV_HEADS * HEAD_SIZE
    shapes = {
        "self_attn.q_proj": (rows, inputs),
        "self_attn.k_proj": (kv_rows, inputs),
        "self_attn.v_proj": (kv_rows, inputs),
        "self_attn.o_proj": (HIDDEN, rows),
        "mlp.gate_proj": (INNER, HIDDEN),
        "mlp.up_proj": (INNER, HIDDEN),
        "mlp.down_proj": (HIDDEN, INNER),
        "post_attention_layernorm": (HIDDEN,),
    } | {norm: (HIDDEN,) for norm in norms}
    return {f"{name}.{key}.weight": draw(random, shape) for key, shape in shapes.items()}


def draw(random: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return random.normal(0, 1, shape).astype(np.float32)


def tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    mask = np.zeros((VOCABULARY,), np.bool_)
    mask[IDS] = True
    return layer("midlayer", 2 * HIDDEN, norms=("input_layernorm", "hidden_norm")) | {
        "fc.weight": draw(random, (HIDDEN, 3 * TARGET_HIDDEN)),
        "norm.weight": draw(random, (HIDDEN,)),
        "embed_tokens.weight": draw(random, (VOCABULARY, HIDDEN)),
        "lm_head.weight": draw(random, (DRAFTED, HIDDEN)),
        "d2t": IDS - np.arange(DRAFTED),
        "t2d": mask,
    }


def eagle_config(**changes: Any) -> dict[str, Any]:
    """SafeAILab's EAGLE."""
    return LAYERS | {"architectures": ["LlamaForCausalLM"], "bias": True} | changes


def eagle_tensors() -> dict[str, np.ndarray]:
    random = np.random.default_rng(1)
    return layer("layers.0", HIDDEN) | {
        "fc.weight": draw(random, (HIDDEN, 2 * HIDDEN)),
        "fc.bias": draw(random, (HIDDEN,)),
        "embed_tokens.weight": draw(random, (VOCABULARY, HIDDEN)),
    }


def write(folder: Path, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "model.safetensors"
    )
    return folder


def renamed(arrays: dict[str, np.ndarray], *pairs: tuple[str, str]) -> dict[str, np.ndarray]:
    result = {}
    for name, array in arrays.items():
        for old, new in pairs:
            if name.startswith(old):
                name = new + name.removeprefix(old)
        result[name] = array
    return result
