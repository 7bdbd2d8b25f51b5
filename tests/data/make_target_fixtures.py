"""Makes tests/data/targets: tiny random models of every architecture and option, as transformers runs them.

Run it where torch and transformers are installed: python tests/data/make_target_fixtures.py
Each folder holds config.json (as written by hand in the old form, or by transformers), the weights,
and expected.safetensors: ids [tokens], hidden [states, tokens, hidden_size], logits [tokens, vocabulary],
greedy [tokens + 8].
"""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

OUT = Path(__file__).parent / "targets"
TOKENS, NEW_TOKENS = 40, 8
SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
QWEN2 = SIZES | {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_act": "silu"}
QWEN3 = SIZES | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_act": "silu"}
GEMMA = SIZES | {"model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"]}
CLASSES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

# name -> (settings, config.json by hand (old form) or by transformers, weights in several files)
CASES = {
    "llama_plain": (LLAMA | {"tie_word_embeddings": True, "num_key_value_heads": 4}, "hand", False),
    "llama_linear_bias": (
        LLAMA
        | {
            "rope_scaling": {"type": "linear", "factor": 4.0},
            "rope_theta": 5000.0,
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 10,
            "num_key_value_heads": 1,
        },
        "hand",
        True,
    ),
    "llama_llama3": (LLAMA | {"rope_scaling": LLAMA3, "rope_theta": 500000.0}, "transformers", False),
    "llama_yarn": (
        LLAMA
        | {
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
            "head_dim": 16,
            "rope_theta": 10000.0,
        },
        "hand",
        False,
    ),
    "qwen3_yarn_stated": (
        QWEN3
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 20000.0,
                "factor": 2.5,
                "original_max_position_embeddings": 128,
                "attention_factor": 1.3,
                "beta_fast": 8,
                "beta_slow": 1,
                "truncate": False,
            },
            "head_dim": 12,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "transformers",
        False,
    ),
    "qwen2_window": (
        QWEN2
        | {
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_theta": 1000000.0,
        },
        "hand",
        False,
    ),
    "qwen3_window": (
        QWEN3
        | {
            "head_dim": 8,
            "use_sliding_window": True,
            "sliding_window": 9,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "rope_theta": 1000000.0,
            "tie_word_embeddings": False,
        },
        "transformers",
        True,
    ),
    "gemma3_old": (
        GEMMA
        | {
            "head_dim": 8,
            "num_hidden_layers": 4,
            "sliding_window": 6,
            "sliding_window_pattern": 3,
            "rope_theta": 100000.0,
            "rope_local_base_freq": 1000.0,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            "query_pre_attn_scalar": 20,
            "final_logit_softcapping": 5.0,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        "hand",
        False,
    ),
    "gemma3_new": (
        GEMMA
        | {
            "head_dim": 10,
            "sliding_window": 5,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "query_pre_attn_scalar": 10,
            "num_key_value_heads": 1,
        },
        "transformers",
        False,
    ),
}


def fill(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough that every option changes the logits."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            scale = 0.3 if name.endswith(("norm.weight", "bias")) else 1.2 / weight.shape[-1] ** 0.5
            centre = weight if "norm" in name else torch.zeros_like(weight)
            weight.copy_(centre + scale * torch.randn(weight.shape, generator=generator))


def make(seed: int, name: str, settings: dict, form: str, in_pieces: bool) -> None:
    folder = OUT / name
    shutil.rmtree(folder, ignore_errors=True)
    config_class, model_class = CLASSES[settings["model_type"]]
    model = model_class(config_class(**json.loads(json.dumps(settings)))).eval()
    model.set_attn_implementation("eager")
    fill(model, seed)
    model.save_pretrained(folder, max_shard_size="20KB" if in_pieces else "1GB")
    (folder / "generation_config.json").unlink()
    if form == "hand":
        (folder / "config.json").write_text(json.dumps(settings, indent=1) + "\n")
    ids = torch.randint(3, settings["vocab_size"], (1, TOKENS), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        out = model(ids, output_hidden_states=True)
        greedy = ids
        for _ in range(NEW_TOKENS):
            greedy = torch.cat([greedy, model(greedy).logits[:, -1:].argmax(-1)], 1)
    top = torch.topk(model(greedy).logits[0, TOKENS - 1 :], 2).values
    print(f"{name}: smallest greedy margin {float((top[:, 0] - top[:, 1]).min()):.3g}")
    save_file(
        {
            "ids": ids[0],
            "hidden": torch.cat(out.hidden_states).contiguous(),
            "logits": out.logits[0].contiguous(),
            "greedy": greedy[0],
        },
        folder / "expected.safetensors",
    )


for number, (case, arguments) in enumerate(CASES.items()):
    make(number, case, *arguments)
