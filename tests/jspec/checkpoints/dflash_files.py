"""Files of a small DFlash drafter, as published ones are written."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, MLP, VOCABULARY = 8, 4, 2, 2, 12, 10


def config(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
        "attention_bias": False,
        "block_size": 6,
        "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 3, -1]},
        "dtype": "bfloat16",
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "layer_types": ["full_attention", "sliding_attention"],
        "max_position_embeddings": 64,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 2,
        "num_key_value_heads": KV_HEADS,
        "num_target_layers": 5,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "sliding_window": 7,
        "tie_word_embeddings": True,
        "vocab_size": VOCABULARY,
    }
    nested = changes.pop("dflash_config", {})
    values["dflash_config"] = {k: v for k, v in (values["dflash_config"] | nested).items() if v != "absent"}
    return {k: v for k, v in (values | changes).items() if v != "absent"}


def tensors() -> dict[str, np.ndarray]:
    shapes = {"fc.weight": (HIDDEN, 3 * HIDDEN), "hidden_norm.weight": (HIDDEN,), "norm.weight": (HIDDEN,)}
    for i in range(2):
        shapes |= {
            f"layers.{i}.input_layernorm.weight": (HIDDEN,),
            f"layers.{i}.post_attention_layernorm.weight": (HIDDEN,),
            f"layers.{i}.self_attn.q_proj.weight": (HEADS * HEAD_SIZE, HIDDEN),
            f"layers.{i}.self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"layers.{i}.self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
            f"layers.{i}.self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD_SIZE),
            f"layers.{i}.self_attn.q_norm.weight": (HEAD_SIZE,),
            f"layers.{i}.self_attn.k_norm.weight": (HEAD_SIZE,),
            f"layers.{i}.mlp.gate_proj.weight": (MLP, HIDDEN),
            f"layers.{i}.mlp.up_proj.weight": (MLP, HIDDEN),
            f"layers.{i}.mlp.down_proj.weight": (HIDDEN, MLP),
        }
    random = np.random.default_rng(0)
    return {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def write(folder: Path, values: dict[str, Any], arrays: dict[str, np.ndarray]) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    save_file(
        {name: np.ascontiguousarray(array) for name, array in arrays.items()}, folder / "model.safetensors"
    )
    return folder


def config2(**changes: Any) -> dict[str, Any]:
    """The same drafter as a DFlash 2 one, in the spelling of the published checkpoints."""
    own = {
        "block_size": 6,
        "conv_group_size": 4,
        "conv_kernel_size": 2,
        "selector_rank": 3,
        "selector_top_k": 5,
    }
    nested = own | changes.pop("dflash_config", {})
    changed = {"architectures": ["DFlash2DraftModel"], "block_size": "absent", "is_causal": False} | changes
    return config(dflash_config=nested, **changed)


def tensors2() -> dict[str, np.ndarray]:
    """Tensors of `config2`."""
    shapes: dict[str, tuple[int, ...]] = {
        "candidate_selector.predecessor_codebook": (VOCABULARY, 3),
        "candidate_selector.successor_codebook": (VOCABULARY, 3),
        "candidate_selector.hidden_projection.weight": (3, HIDDEN),
    }
    for i in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            shapes[f"layers.{i}.{conv}.base_kernel"] = (2, 2, HIDDEN)
            shapes[f"layers.{i}.{conv}.kernel_projection.weight"] = (2 * 2 * HIDDEN // 4, HIDDEN)
    random = np.random.default_rng(1)
    return tensors() | {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
