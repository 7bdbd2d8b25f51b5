"""Hugging Face configs: what is read, what is assumed, what is refused."""

import math

import pytest

from jspec.checkpoints.hf_config import config_from_hf
from jspec.targets.rope import Linear, Llama3, Rope, Yarn

SIZES = {
    "vocab_size": 96,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
}
LLAMA = SIZES | {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_act": "silu"}
QWEN2 = SIZES | {"model_type": "qwen2", "hidden_act": "silu", "rope_theta": 1e6}
QWEN3 = QWEN2 | {"model_type": "qwen3", "head_dim": 8}
GEMMA = {"model_type": "gemma3_text", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 7}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_llama_takes_documented_defaults():
    config = config_from_hf({k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})

    assert config.num_kv_heads == 4 and config.head_size == 6
    assert config.full_rope == Rope(theta=10_000.0)
    assert not (config.tied_head or config.qkv_bias or config.output_bias or config.mlp_bias)
    assert config.layer_kinds == ("full",) * 3 and config.window is None
    assert config.query_scale == pytest.approx(6**-0.5)


def test_qwen2_has_biases_on_q_k_v_only_and_qwen3_none_but_norms():
    two, three = config_from_hf(QWEN2), config_from_hf(QWEN3)

    assert two.qkv_bias and not two.output_bias and not two.query_key_norm
    assert three.query_key_norm and not three.qkv_bias and three.head_size == 8
    assert config_from_hf(QWEN3 | {"attention_bias": True}).output_bias


def test_sparse_gemma_text_config_takes_documented_defaults():
    config = config_from_hf(
        GEMMA | {"sliding_window": 16, "rope_scaling": {"rope_type": "linear", "factor": 8.0}}
    )

    assert (config.num_heads, config.num_kv_heads, config.head_size) == (8, 4, 256)
    assert (config.vocab_size, config.max_context, config.norm_eps) == (262_208, 131_072, 1e-6)
    assert config.layer_kinds == ("window",) * 5 + ("full", "window") and config.window == 16
    assert config.full_rope == Rope(theta=1e6, scaling=Linear(factor=8.0))
    assert config.window_rope == Rope(theta=1e4)
    assert config.activation == "gelu_tanh" and config.sandwich_norms and config.tied_head
    assert config.embedding_scale == math.sqrt(32) and config.query_scale == 1 / 16


def test_multimodal_gemma_is_read_by_its_text_part():
    outer = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "text_config": GEMMA,
        "vision_config": {"hidden_size": 1152},
        "mm_tokens_per_image": 256,
        "boi_token_index": 255_999,
        "torch_dtype": "bfloat16",
    }
    assert config_from_hf(outer) == config_from_hf(GEMMA)
    with pytest.raises(ValueError, match=r"text_config: expected the settings of the text model, got None"):
        config_from_hf(outer | {"text_config": None})
    with pytest.raises(ValueError, match=r"audio_config: expected no such key beside text_config"):
        config_from_hf(outer | {"audio_config": {}})


@pytest.mark.parametrize("rule", [{}, {"rope_type": "linear", "factor": 2.0}, LLAMA3, YARN])
def test_old_and_new_rope_forms_say_the_same(rule):
    old = LLAMA | {"rope_theta": 5e5, "rope_scaling": rule or None}
    new = LLAMA | {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5} | rule}
    inside = LLAMA | {"rope_scaling": {"rope_theta": 5e5} | rule}

    assert config_from_hf(old) == config_from_hf(new) == config_from_hf(inside)


def test_gemma_rope_forms_say_the_same():
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = GEMMA | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": scaling}
    new = GEMMA | {
        "rope_parameters": {
            "full_attention": scaling | {"rope_theta": 5e5},
            "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
        }
    }
    assert config_from_hf(old) == config_from_hf(new)


def test_yarn_details():
    def scaling(**more):
        return config_from_hf(LLAMA | {"rope_scaling": YARN | more}).full_rope.scaling

    assert scaling() == Yarn(factor=4.0, original_context=64, attention_factor=0.1 * math.log(4) + 1)
    assert scaling(attention_factor=1.5, beta_fast=16, beta_slow=2, truncate=False) == Yarn(
        factor=4.0, original_context=64, attention_factor=1.5, beta_fast=16.0, beta_slow=2.0, truncate=False
    )
    assert scaling(factor=None).factor == 256 / 64
    assert scaling(mscale=1.0, mscale_all_dim=1.0).attention_factor == 1.0


def test_original_context_may_stand_beside_the_rule_or_be_the_models():
    beside = config_from_hf(LLAMA | {"rope_scaling": LLAMA3, "original_max_position_embeddings": 64})
    missing = config_from_hf(LLAMA | {"rope_scaling": LLAMA3})

    assert beside.full_rope.scaling == Llama3(
        factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64
    )
    assert missing.full_rope.scaling.original_context == 256


def test_windows_of_qwen():
    window = {"use_sliding_window": True, "sliding_window": 16}
    types = ["sliding_attention", "full_attention", "sliding_attention"]

    assert config_from_hf(QWEN3 | {"sliding_window": 16}).window is None
    assert config_from_hf(QWEN3 | window | {"max_window_layers": 1}).layer_kinds == (
        "full",
        "window",
        "window",
    )
    assert config_from_hf(QWEN3 | window | {"max_window_layers": 3}).window is None
    assert config_from_hf(QWEN3 | window | {"layer_types": types}).layer_kinds == ("window", "full", "window")


def test_keys_that_do_not_change_the_maths_are_passed_over():
    extra = {
        "torch_dtype": "bfloat16",
        "transformers_version": "4.45.0",
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "quantization_config": None,
        "rope_interleaved": False,
        "is_llama_config": True,
        "eos_token_id": [1, 2],
    }
    assert config_from_hf(LLAMA | extra) == config_from_hf(LLAMA)


NEEDED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
NEEDED += ["max_position_embeddings", "rms_norm_eps", "hidden_act"]


@pytest.mark.parametrize("base", [LLAMA, QWEN2, QWEN3], ids=["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("key", NEEDED)
def test_missing_keys_that_the_maths_needs_are_refused(base, key):
    with pytest.raises(ValueError, match=f"{key}: expected a value for a .* model, got none"):
        config_from_hf({k: v for k, v in base.items() if k != key})


@pytest.mark.parametrize("key", ["num_key_value_heads", "rope_theta"])
def test_qwen_states_its_kv_heads_and_rope_base(key):
    with pytest.raises(ValueError, match=f"{key}: expected"):
        config_from_hf({k: v for k, v in QWEN3.items() if k != key})


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (LLAMA, {"model_type": "mistral"}, "model_type: expected one of llama, qwen2, .* got 'mistral'"),
        (LLAMA, {"model_type": None}, "model_type: expected one of"),
        (LLAMA, {"architectures": ["LlamaForCausalLMEagle3"]}, "architectures: expected LlamaForCausalLM"),
        (QWEN3, {"architectures": ["DFlashDraftModel"]}, "architectures: expected Qwen3ForCausalLM"),
        (
            LLAMA,
            {"logit_scale": 2.0},
            "logit_scale: expected no such key for a llama model, got 2.0",
        ),
        (LLAMA, {"auto_map": {}}, "auto_map: expected no such key"),
        (LLAMA, {"sliding_window": 16}, "sliding_window: expected no such key"),
        (QWEN2, {"mlp_bias": True}, "mlp_bias: expected no such key"),
        (LLAMA, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config: expected None"),
        (LLAMA, {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected None or 1"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved: expected None or False, got True"),
        (LLAMA, {"hidden_act": "gelu"}, "hidden_act: expected one of silu, gelu_pytorch_tanh, got 'gelu'"),
        (
            LLAMA,
            {"hidden_size": 25, "head_dim": None},
            "head_dim: expected a value, as 4 heads do not divide",
        ),
        (LLAMA, {"num_key_value_heads": 3}, "num_kv_heads: expected a divisor of 4 query heads, got 3"),
        (LLAMA, {"head_dim": 7}, "head_size: expected an even number"),
        (LLAMA, {"vocab_size": 0}, "vocab_size: expected a positive integer, got 0"),
        (LLAMA, {"vocab_size": "96"}, "vocab_size: expected a positive integer, got '96'"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a positive number, got nan"),
        (LLAMA, {"tie_word_embeddings": None}, "tie_word_embeddings: expected true or false, got None"),
        (GEMMA, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: expected None, got 50.0"),
        (GEMMA, {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected"),
        (GEMMA, {"sliding_window": None}, "sliding_window: expected a positive integer for the sliding"),
        (GEMMA, {"layer_types": ["chunked_attention"] * 7}, "layer_types: expected 7 of full_attention or"),
        (QWEN3, {"layer_types": ["full_attention"]}, "layer_types: expected 3 of"),
        (
            QWEN3,
            {"layer_types": ["sliding_attention"] * 3},
            "sliding_window: expected .* got None; set use_sliding_window to true",
        ),
    ],
)
def test_what_would_change_the_maths_is_refused(base, change, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(base | change)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"type": "dynamic", "factor": 2.0}, "rope_type: expected one of default, linear, .* got dynamic"),
        ({"rope_type": "longrope"}, "rope_type: .* got longrope"),
        ({"type": "mrope", "rope_type": "default"}, "rope_type: expected one of"),
        ({"rope_type": "linear"}, "rope_scaling: expected key 'factor' for rope_type 'linear', got none"),
        ({"rope_type": "linear", "factor": 0}, "factor: expected a positive number, got 0"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 3}, "rope_scaling: expected no key 'beta_fast'"),
        ({"factor": 2.0}, "rope_scaling: expected no key 'factor' for rope_type 'default'"),
        ({"rope_type": "llama3", "factor": 8.0}, "rope_scaling: expected key 'low_freq_factor'"),
        (
            {"rope_type": "yarn", "original_max_position_embeddings": 64},
            "rope_scaling: expected key 'factor'",
        ),
        (YARN | {"partial_rotary_factor": 0.5}, "partial_rotary_factor: expected 1, got 0.5"),
        (YARN | {"rope_theta": 1e5}, "rope_theta: expected one value, got 100000.0 .* and 500000.0 beside"),
        ("yarn", "rope_scaling: expected a dict or null, got 'yarn'"),
    ],
)
def test_rope_settings_that_are_not_understood_are_refused(scaling, message):
    with pytest.raises(ValueError, match=message):
        config_from_hf(LLAMA | {"rope_theta": 5e5, "rope_scaling": scaling})


def test_rope_forms_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"rope_parameters: expected it alone or equal to rope_scaling"):
        config_from_hf(LLAMA | {"rope_scaling": YARN, "rope_parameters": LLAMA3})
    with pytest.raises(
        ValueError, match=r"rope_parameters: expected full_attention and sliding_attention inside"
    ):
        config_from_hf(GEMMA | {"rope_parameters": {"rope_type": "default"}})
    with pytest.raises(ValueError, match=r"original_max_position_embeddings: expected one value, got 64"):
        config_from_hf(LLAMA | {"rope_scaling": YARN, "original_max_position_embeddings": 32})
