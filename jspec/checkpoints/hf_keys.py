"""What every key of a Hugging Face config means to us: its default, the values it may have, or nothing."""

from typing import Any

_GENERAL: dict[str, Any] = {
    "head_dim": None,  # null = hidden_size / num_attention_heads
    "tie_word_embeddings": False,
    "rope_scaling": None,
    "rope_parameters": None,
    "original_max_position_embeddings": None,
}
_QWEN: dict[str, Any] = _GENERAL | {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
    "rope_theta": None,
}

# Architecture -> what transformers 5 takes for a key that is missing, where published checkpoints
# do leave it out or the shapes of the tensors check it. A missing key that is not here is refused.
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _GENERAL
    | {"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False, "rope_theta": 10_000.0},
    "qwen2": _QWEN,
    "qwen3": _QWEN | {"head_dim": 128, "attention_bias": False},
    "gemma3": _GENERAL
    | {
        "vocab_size": 262_208,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "attention_bias": False,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "layer_types": None,
        "sliding_window_pattern": 6,
        "final_logit_softcapping": None,
    },
}

# `model_type` -> architecture, and the classes of `architectures` that are a language model of it.
MODEL_TYPES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma3_text": "gemma3",
    "gemma3": "gemma3",
}
CLASSES = {
    "llama": {"LlamaForCausalLM"},
    "qwen2": {"Qwen2ForCausalLM"},
    "qwen3": {"Qwen3ForCausalLM"},
    "gemma3_text": {"Gemma3ForCausalLM"},
    "gemma3": {"Gemma3ForConditionalGeneration", "Gemma3ForCausalLM"},
}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}

# Keys with the only values that leave the maths as it is implemented here.
FIXED: dict[str, tuple[Any, ...]] = {
    "quantization_config": (None,),
    "partial_rotary_factor": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "use_mrope": (None, False),
    "use_bidirectional_attention": (None, False),
    # For Gemma 3, transformers reads this key and never applies it: two readings, so neither.
    "attn_logit_softcapping": (None,),
    "is_encoder_decoder": (None, False),
    "is_decoder": (None, False, True),
    "add_cross_attention": (None, False),
    "cross_attention_hidden_size": (None,),
    "pruned_heads": (None, {}),
    "tie_encoder_decoder": (None, False),
}

# fmt: off
# Keys that say nothing about the forward pass of an evaluated model; then settings of generation,
# which old files hold too.
IGNORED = frozenset([
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_model_name_or_path",
    "_name_or_path", "architectures", "attention_dropout", "attn_implementation", "bos_token_id",
    "cache_implementation", "chunk_size_feed_forward", "decoder_start_token_id", "dtype",
    "eos_token_id", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "gradient_checkpointing", "id2label", "initializer_range", "is_llama_config", "label2id",
    "model_type", "name_or_path", "output_attentions", "output_hidden_states", "pad_token_id", "prefix",
    "pretraining_tp", "problem_type", "return_dict", "sep_token_id", "task_specific_params",
    "tf_legacy_loss", "tokenizer_class", "torch_dtype", "torchscript", "transformers.js_config",
    "transformers_version", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_cache",

    "bad_words_ids", "begin_suppress_tokens", "diversity_penalty", "do_sample", "early_stopping",
    "encoder_no_repeat_ngram_size", "exponential_decay_length_penalty", "length_penalty", "max_length",
    "max_new_tokens", "min_length", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_scores", "remove_invalid_values", "repetition_penalty",
    "return_dict_in_generate", "suppress_tokens", "temperature", "top_k", "top_p", "typical_p",
])
# Around the text model of a multimodal Gemma 3.
AROUND_TEXT = frozenset([
    "boi_token_id", "boi_token_index", "eoi_token_id", "eoi_token_index", "image_token_id",
    "image_token_index", "mm_tokens_per_image", "vision_config",
])
# fmt: on
# Qwen2 always has biases on q, k and v and none elsewhere, whatever this key says.
IGNORED_BY = {"qwen2": frozenset({"attention_bias"}), "gemma3": frozenset({"_sliding_window_pattern"})}
