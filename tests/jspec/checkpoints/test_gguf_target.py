"""GGUF files: written here as llama.cpp's converter lays them out, and read back."""

import json
import struct
from pathlib import Path

import gguf
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.checkpoints.gguf_file import open_gguf
from jspec.checkpoints.target import load_target
from jspec.targets.decoder import decoder_leaves
from jspec.targets.rope import Divisors, Linear, Rope, Yarn, inverse_frequencies

FOLDER = Path(__file__).parents[2] / "data" / "targets"
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
SANDWICH = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name: str, names: dict[str, str]) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem in TOP:
        return f"{TOP[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{names[rest]}.{kind}"


def finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def write(path: Path, case: str, fields: dict | None = None, tensors: dict | None = None, drop=()) -> Path:
    """Writes a Hugging Face case as a GGUF file; `fields` and `tensors` add to it or replace."""
    config = json.loads((FOLDER / case / "config.json").read_text())
    architecture = config["model_type"].removesuffix("_text")
    gemma = architecture == "gemma3"
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    values: dict[str, np.ndarray] = {}
    for file in sorted((FOLDER / case).glob("model*.safetensors")):
        for name, value in load_file(file).items():
            if gemma and name.endswith("norm.weight"):
                value = value + 1
            proj = name.split(".")[-2]
            if architecture == "llama" and proj in heads:
                # The converter's own formula: halves of each head become pairs.
                value = (
                    value.reshape(heads[proj], 2, -1, *value.shape[1:]).swapaxes(1, 2).reshape(value.shape)
                )
            values[gguf_name(name, NAMES | SANDWICH if gemma else NAMES)] = value
    values |= tensors or {}

    writer = gguf.GGUFWriter(path, architecture)
    settings = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "attention.key_length": config.get("head_dim")
        or config["hidden_size"] // config["num_attention_heads"],
    } | (fields or {})
    for key, value in settings.items():
        full = key if key.startswith(("tokenizer.", "split.")) else f"{architecture}.{key}"
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(full, value)
        elif isinstance(value, str):
            writer.add_string(full, value)
        elif isinstance(value, float):
            writer.add_float32(full, value)
        else:
            writer.add_uint32(full, value)
    for name, value in values.items():
        if name not in drop:
            writer.add_tensor(name, np.ascontiguousarray(value, np.float32))
    finish(writer)
    return path


GEMMA_FIELDS = {
    "attention.sliding_window": 5,
    "attention.sliding_window_pattern": [False, True, True],
    "rope.freq_base": 1_000_000.0,
}
YARN_FIELDS = {
    "rope.scaling.type": "yarn",
    "rope.scaling.factor": 4.0,
    "rope.scaling.original_context_length": 32,
}


@pytest.mark.parametrize(
    ("case", "fields"),
    [
        ("llama_plain", {}),
        (
            "llama_linear_bias",
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.freq_base": 5000.0},
        ),
        ("llama_yarn", YARN_FIELDS),
        ("gemma3_new", GEMMA_FIELDS),
    ],
)
def test_a_converted_model_is_the_same_model(tmp_path, case, fields):
    plain = load_target(FOLDER / case, dtype="float32")

    loaded = load_target(write(tmp_path / "model.gguf", case, fields), dtype="float32")

    own, other = loaded.target.config, plain.target.config
    assert own.norm_eps == pytest.approx(other.norm_eps)
    assert {k: v for k, v in vars(own).items() if k != "norm_eps"} == {
        k: v for k, v in vars(other).items() if k != "norm_eps"
    }
    for leaf, got, expected in zip(
        decoder_leaves(own, jnp.dtype("float32")), loaded.params, plain.params, strict=True
    ):
        np.testing.assert_allclose(got, expected, rtol=1e-6, atol=1e-6, err_msg=leaf.path)


def test_qwen2_biases_are_found(tmp_path):
    loaded = load_target(write(tmp_path / "model.gguf", "qwen2_window"), dtype="float32")

    config = loaded.target.config
    assert config.qkv_bias and not config.output_bias and config.tied_head and config.window is None


def test_llama3_rope_is_read_from_its_divisors(tmp_path):
    rule = load_target(FOLDER / "llama_llama3", dtype="float32").target.config.full_rope
    divisors = inverse_frequencies(Rope(theta=rule.theta), 6) / inverse_frequencies(rule, 6)
    file = write(
        tmp_path / "model.gguf",
        "llama_llama3",
        {"rope.freq_base": 500_000.0},
        {"rope_freqs.weight": divisors},
    )

    rope = load_target(file, dtype="float32").target.config.full_rope

    assert rope == Rope(theta=500_000.0, scaling=Divisors(values=tuple(divisors.tolist())))
    np.testing.assert_allclose(inverse_frequencies(rope, 6), inverse_frequencies(rule, 6), rtol=1e-6)


def test_gemma_without_a_pattern_has_every_sixth_layer_full(tmp_path):
    fields = GEMMA_FIELDS | {"attention.sliding_window_pattern": None, "rope.scaling.type": "linear"}
    fields |= {"rope.scaling.factor": 8.0, "final_logit_softcapping": 30.0}
    config = load_target(write(tmp_path / "model.gguf", "gemma3_new", fields), dtype="float32").target.config

    assert config.layer_kinds == ("window",) * 3
    assert config.full_rope == Rope(theta=1e6, scaling=Linear(factor=8.0)) and config.window_rope == Rope(
        theta=1e4
    )
    assert config.final_softcap == 30.0


def test_yarn_details_are_read(tmp_path):
    fields = YARN_FIELDS | {"rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_beta_fast": 16.0}
    scaling = load_target(
        write(tmp_path / "model.gguf", "llama_yarn", fields), dtype="float32"
    ).target.config.full_rope.scaling

    assert scaling == Yarn(
        factor=4.0, original_context=32, attention_factor=scaling.attention_factor, beta_fast=16.0
    )
    assert scaling.attention_factor == pytest.approx(0.5 * 1.138629)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1"])
def test_stored_types_are_dequantised(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    weight = np.linspace(-1, 1, 3 * 64, dtype=np.float32).reshape(3, 64)
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_tensor("weight", gguf.quantize(weight, kind), raw_dtype=kind)
    finish(writer)

    file = open_gguf(tmp_path / "model.gguf")

    file.check_type("weight")
    assert file.shapes == {"weight": (3, 64)}
    np.testing.assert_allclose(file.read("weight"), weight, atol=0.08)


def several(path: Path) -> Path:
    """Three tensors of odd sizes in data that is aligned to 128 bytes."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_custom_alignment(128)
    writer.add_tensor("first", np.arange(7, dtype=np.float32))
    writer.add_tensor("second", np.arange(6, dtype=np.float16).reshape(3, 2))
    writer.add_tensor("third", np.arange(5, dtype=np.float64) + 0.1)
    finish(writer)
    return path


def test_tensors_lie_where_the_header_says(tmp_path):
    file = open_gguf(several(tmp_path / "model.gguf"))

    assert file.shapes == {"first": (7,), "second": (3, 2), "third": (5,)}
    np.testing.assert_array_equal(file.read("first"), np.arange(7))
    np.testing.assert_array_equal(file.read("second"), [[0, 1], [2, 3], [4, 5]])
    np.testing.assert_array_equal(file.read("third"), np.arange(5) + 0.1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (b"third", b"first", "'first' twice"),
        (struct.pack("<QIQ", 7, 0, 0), struct.pack("<QIQ", 7, 99, 0), "99 is not a valid"),
        (
            struct.pack("<QIQ", 7, 0, 0),
            struct.pack("<QIQ", 7, 8, 0),
            r"'first' of sides \(7,\) in blocks of 32",
        ),
        (struct.pack("<QIQ", 7, 0, 0), struct.pack("<QIQ", 7, 0, 2**40), "'first' that ends at byte"),
        (struct.pack("<QIQ", 7, 0, 0), struct.pack("<QIQ", 2**61, 0, 0), "'first' that ends at byte"),
        (struct.pack("<II", 4, 128), struct.pack("<II", 4, 96), "alignment as a power of two, got 96"),
    ],
    ids=["twice", "type", "block", "offset", "size", "alignment"],
)
def test_a_damaged_list_of_tensors_is_refused(tmp_path, old, new, message):
    file = several(tmp_path / "model.gguf")
    whole = file.read_bytes()
    assert whole.count(old) == 1
    file.write_bytes(whole.replace(old, new))
    with pytest.raises(
        ValueError, match=rf"model.gguf: expected a whole GGUF file, got .* bytes .*{message}"
    ):
        open_gguf(file)


def test_integers_are_no_weights(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "integers.gguf", "llama")
    writer.add_tensor("weight", np.ones((2, 3), np.int32))
    finish(writer)
    with pytest.raises(
        ValueError, match=r"expected tensor 'weight' in a type that the gguf package .* got I32"
    ):
        open_gguf(tmp_path / "integers.gguf").check_type("weight")


def test_special_ids_come_from_the_tokenizer_fields(tmp_path):
    fields = {
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.eot_token_id": 7,
        "tokenizer.ggml.bos_token_id": 1,
    }
    loaded = load_target(write(tmp_path / "model.gguf", "llama_plain", fields), dtype="float32")

    assert loaded.eos_ids == (2, 7) and loaded.bos_id == 1
    bare = load_target(write(tmp_path / "bare.gguf", "llama_plain"), dtype="float32")
    assert bare.eos_ids == () and bare.bos_id is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"attention.layer_norm_rms_epsilon": None},
            "expected metadata llama.attention.layer_norm_rms_epsilon",
        ),
        ({"block_count": None}, "expected metadata llama.block_count, got none"),
        ({"expert_count": 8}, "expected a dense model, got 8 experts"),
        ({"rope.dimension_count": 4}, "expected llama.rope.dimension_count 6, got 4"),
        ({"attention.sliding_window": 64}, "expected no sliding window for llama, got 64"),
        (
            {"rope.scaling.type": "longrope", "rope.scaling.factor": 2.0},
            "rope.scaling.type none, linear or yarn",
        ),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}, "yarn with its original context"),
        ({"rope.scaling.type": "linear"}, "expected rope.scaling.factor for rope.scaling.type 'linear'"),
        ({"logit_scale": 2.0}, "expected no metadata llama.logit_scale, got 2.0"),
        ({"block_count": 2}, r"expected no tensor 'blk.2.attn_k.weight' \(and 8 more\)"),
        (
            {"feed_forward_length": 41},
            r"expected shape \[24, 41\] for tensor 'blk.0.ffn_down.weight', got \[24, 40\]",
        ),
        ({"split.count": 3}, "expected one GGUF file, got part of 3"),
    ],
)
def test_metadata_that_is_missing_or_not_understood_is_refused(tmp_path, fields, message):
    file = write(tmp_path / "model.gguf", "llama_plain", fields)
    with pytest.raises(ValueError, match=message):
        load_target(file, dtype="float32")


def test_missing_and_unknown_tensors_are_named(tmp_path):
    file = write(tmp_path / "model.gguf", "llama_plain", drop=("blk.1.attn_k.weight",))
    with pytest.raises(ValueError, match=r"expected tensor 'blk.1.attn_k.weight', got none"):
        load_target(file, dtype="float32")
    file = write(tmp_path / "other.gguf", "llama_plain", drop=("token_embd.weight",))
    with pytest.raises(ValueError, match=r"expected tensor 'token_embd.weight' with two axes, got None"):
        load_target(file, dtype="float32")
    file = write(tmp_path / "more.gguf", "llama_plain", tensors={"blk.0.attn_rot.weight": np.ones(3)})
    with pytest.raises(ValueError, match=r"expected no tensor 'blk.0.attn_rot.weight'"):
        load_target(file, dtype="float32")


def test_another_architecture_is_refused(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "mamba")
    finish(writer)
    with pytest.raises(ValueError, match=r"expected general.architecture llama or .*, got 'mamba'"):
        load_target(tmp_path / "model.gguf", dtype="float32")


@pytest.mark.parametrize("kept", [0.0, 0.001, 0.02, 0.05, 0.3, 0.9, 0.999])
def test_truncated_files_are_refused(tmp_path, kept):
    whole = write(tmp_path / "whole.gguf", "llama_plain").read_bytes()
    file = tmp_path / "model.gguf"
    file.write_bytes(whole[: int(kept * len(whole))])
    with pytest.raises(ValueError, match=r"model.gguf: expected a whole GGUF file, got .* bytes"):
        load_target(file, dtype="float32")


def test_a_file_of_something_else_is_refused(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"not a model at all" * 20)
    with pytest.raises(ValueError, match=r"model.gguf: expected a whole GGUF file"):
        load_target(file, dtype="float32")
