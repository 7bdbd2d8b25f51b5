"""Hugging Face folders: every tensor accounted for, and clear errors for damaged ones."""

import json
import shutil
import weakref
from pathlib import Path
from typing import ClassVar

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jspec.checkpoints.hf_target import hf_plan
from jspec.checkpoints.leaves import read_leaves
from jspec.checkpoints.target import load_target
from jspec.targets.decoder import decoder_leaves, decoder_units

FOLDER = Path(__file__).parents[2] / "data" / "targets"


@pytest.fixture
def copy(tmp_path):
    """Copies a case to a folder that a test may damage."""

    def copied(case: str) -> Path:
        shutil.copytree(FOLDER / case, tmp_path / case)
        return tmp_path / case

    return copied


def change(folder: Path, edit) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def set_config(folder: Path, **values) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def leaf(loaded, path: str):
    paths = [leaf.path for leaf in decoder_leaves(loaded.target.config, jnp.dtype("float32"))]
    return loaded.params[paths.index(path)]


def test_matrices_are_stored_in_out_and_the_dtype_asked_for():
    loaded = load_target(FOLDER / "llama_linear_bias", dtype="bfloat16")
    wanted = load_target(FOLDER / "llama_linear_bias", dtype="float32")

    assert leaf(wanted, "layers.1.attention.query").shape == (24, 40)
    assert leaf(wanted, "embedding").shape == (61, 24) and leaf(wanted, "head").shape == (24, 61)
    for got, exact, spec in zip(
        loaded.params, wanted.params, decoder_leaves(loaded.target.config, jnp.dtype("bfloat16")), strict=True
    ):
        assert got.dtype == (jnp.float32 if "norm" in spec.path else jnp.bfloat16), spec.path
        np.testing.assert_array_equal(got, exact.astype(got.dtype))


@pytest.mark.parametrize("stored", [ml_dtypes.bfloat16, np.float16, np.float64])
def test_other_stored_types_are_converted(copy, stored):
    folder = copy("llama_plain")
    change(folder, lambda t: t.update({name: value.astype(stored) for name, value in t.items()}))
    exact = leaf(load_target(FOLDER / "llama_plain", dtype="float32"), "layers.0.mlp.down")

    got = leaf(load_target(folder, dtype="float32"), "layers.0.mlp.down")

    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, np.asarray(exact).astype(stored).astype(np.float32))


def test_gemma_norms_hold_one_plus_the_stored_weight():
    stored = load_file(FOLDER / "gemma3_new" / "model.safetensors")
    loaded = load_target(FOLDER / "gemma3_new", dtype="float32")

    for path, name in {
        "norm": "model.norm.weight",
        "layers.2.attention.key_norm": "model.layers.2.self_attn.k_norm.weight",
        "layers.2.mlp_norm": "model.layers.2.pre_feedforward_layernorm.weight",
    }.items():
        np.testing.assert_array_equal(leaf(loaded, path), stored[name] + 1)


@pytest.mark.parametrize("prefix", ["language_model.model.", "model.language_model."])
def test_multimodal_gemma_gives_its_text_model(copy, prefix):
    folder = copy("gemma3_new")
    plain = load_target(folder, dtype="float32")
    text = json.loads((folder / "config.json").read_text())
    outer = {"model_type": "gemma3", "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    tensors = {name.replace("model.", prefix, 1): value for name, value in tensors.items()}
    tensors["vision_tower.vision_model.embeddings.weight"] = np.zeros((3, 3), np.float32)
    save_file(tensors, folder / "model.safetensors")

    loaded = load_target(folder, dtype="float32")

    assert loaded.target == plain.target and loaded.eos_ids == plain.eos_ids
    for got, expected in zip(loaded.params, plain.params, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_missing_tensor_is_named(copy):
    folder = copy("llama_plain")
    change(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"expected tensor 'model.layers.1.mlp.up_proj.weight', got none"):
        load_target(folder, dtype="float32")


def test_an_untied_config_without_a_head_is_refused(copy):
    folder = copy("llama_plain")
    set_config(folder, tie_word_embeddings=False)
    with pytest.raises(ValueError, match=r"expected tensor 'lm_head.weight', got none"):
        load_target(folder, dtype="float32")


def test_a_tied_config_may_repeat_its_head_but_not_change_it(copy):
    folder = copy("llama_plain")
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}))
    load_target(folder, dtype="float32")
    change(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + 1}))
    with pytest.raises(
        ValueError, match=r"expected tensor 'lm_head.weight' to equal 'model.embed_tokens.weight'"
    ):
        load_target(folder, dtype="float32")


def test_unexpected_tensor_is_named_and_buffers_are_passed_over(copy):
    folder = copy("llama_plain")
    change(
        folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(3, np.float32)})
    )
    load_target(folder, dtype="float32")
    change(folder, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": np.ones(24, np.float32)}))
    with pytest.raises(ValueError, match=r"expected no tensor 'model.layers.0.self_attn.q_proj.bias'"):
        load_target(folder, dtype="float32")


def test_more_layers_than_the_config_says_are_refused(copy):
    folder = copy("llama_plain")
    set_config(folder, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"expected no tensor 'model.layers.2.* \(and 8 more\)"):
        load_target(folder, dtype="float32")


def test_wrong_shape_names_tensor_and_both_shapes(copy):
    folder = copy("llama_plain")
    set_config(folder, intermediate_size=41)
    with pytest.raises(
        ValueError, match=r"expected shape \[24, 41\] for tensor '.*down_proj.weight', got \[24, 40\]"
    ):
        load_target(folder, dtype="float32")


def test_quantised_tensors_are_refused(copy):
    folder = copy("llama_plain")
    change(folder, lambda t: t.update({"model.norm.weight": np.ones(24, np.int8)}))
    with pytest.raises(ValueError, match=r"expected tensor 'model.norm.weight' as one of F64, .* got I8"):
        load_target(folder, dtype="float32")


@pytest.mark.parametrize("kept", [0, 7, 8, 500, 0.5, -1])
def test_truncated_weights_are_refused(copy, kept):
    folder = copy("llama_plain")
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[: int(kept * len(whole)) if isinstance(kept, float) else kept])
    with pytest.raises(ValueError, match=r"model.safetensors: expected .*truncated"):
        load_target(folder, dtype="float32")


def test_a_longer_file_or_a_corrupt_header_is_refused(copy):
    file = copy("llama_plain") / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=r"it is truncated or damaged"):
        load_target(file.parent, dtype="float32")
    file.write_bytes(whole[:8] + b"}" + whole[9:])
    with pytest.raises(ValueError, match=r"model.safetensors: expected a safetensors header"):
        load_target(file.parent, dtype="float32")
    file.write_bytes(whole.replace(b'"shape":[24]', b'"shape":[25]', 1))
    with pytest.raises(ValueError, match=r"got 96 bytes for a F32 tensor of shape \[25\]"):
        load_target(file.parent, dtype="float32")


def test_an_index_must_be_borne_out_by_its_files(copy):
    folder = copy("qwen3_window")
    index = folder / "model.safetensors.index.json"
    text = index.read_text()
    (folder / "model-00002-of-00005.safetensors").rename(folder / "aside")
    with pytest.raises(
        ValueError, match=r"expected the file model-00002-of-00005.safetensors beside it, got none"
    ):
        load_target(folder, dtype="float32")
    (folder / "aside").rename(folder / "model-00002-of-00005.safetensors")
    index.write_text(
        text.replace('"weight_map": {', '"weight_map": {"extra": "model-00001-of-00005.safetensors",')
    )
    with pytest.raises(
        ValueError, match=r"expected tensor 'extra' in model-00001-of-00005.safetensors, got none"
    ):
        load_target(folder, dtype="float32")
    index.write_text("{}")
    with pytest.raises(ValueError, match=r"expected JSON with a weight_map"):
        load_target(folder, dtype="float32")
    index.write_text('{"weight_map": {"a": "../secret.safetensors"}}')
    with pytest.raises(ValueError, match=r"expected plain file names"):
        load_target(folder, dtype="float32")


def test_missing_files_are_named(copy, tmp_path):
    with pytest.raises(ValueError, match=r"path: expected a model's folder or a .gguf file, got .*nothing"):
        load_target(tmp_path / "nothing", dtype="float32")
    folder = copy("llama_plain")
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ValueError, match=r"path: expected model.safetensors or model.safetensors.index.json in"
    ):
        load_target(folder, dtype="float32")
    (folder / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: expected JSON"):
        load_target(folder, dtype="float32")
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match=r"path: expected config.json in"):
        load_target(folder, dtype="float32")


def test_config_errors_name_the_file(copy):
    folder = copy("llama_plain")
    set_config(folder, logit_scale=2)
    with pytest.raises(ValueError, match=r"llama_plain/config.json: logit_scale: expected no such key"):
        load_target(folder, dtype="float32")


def test_dtype_and_context_are_checked():
    with pytest.raises(ValueError, match=r"dtype: expected one of float32, bfloat16, float16, got int8"):
        load_target(FOLDER / "llama_plain", dtype="int8")
    with pytest.raises(ValueError, match=r"max_context: expected 1 to 256, got 257"):
        load_target(FOLDER / "llama_plain", dtype="float32", max_context=257)
    assert load_target(FOLDER / "llama_plain", dtype="float32", max_context=64).target.max_context == 64


def test_generation_config_decides_where_a_text_ends(copy):
    folder = copy("llama_plain")
    assert load_target(folder, dtype="float32").eos_ids == (2,)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    loaded = load_target(folder, dtype="float32")
    assert loaded.eos_ids == (7, 9) and loaded.bos_id == 1
    (folder / "generation_config.json").unlink()
    set_config(folder, eos_token_id=None, bos_token_id=None)
    loaded = load_target(folder, dtype="float32")
    assert loaded.eos_ids == () and loaded.bos_id is None


def aligned(shape: tuple[int, ...]) -> np.ndarray:
    """Zeros that a CPU device could adopt without a copy."""
    raw = np.zeros(int(np.prod(shape)) * 4 + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + int(np.prod(shape)) * 4].view(np.float32).reshape(shape)


class Watched(np.ndarray):
    """An array that can be watched for being freed."""


class Memory:
    """A checkpoint in memory."""

    where = "memory"
    shapes: ClassVar[dict[str, tuple[int, ...]]] = {}

    def __init__(self, config, plan, make):
        leaves = decoder_leaves(config, jnp.dtype("float32"))
        self.leaf = {plan.origins[leaf.path].name: (leaf, plan.origins[leaf.path]) for leaf in leaves}
        self.make = make

    def check_type(self, name: str) -> None: ...

    def read(self, name: str) -> np.ndarray:
        leaf, origin = self.leaf[name]
        return self.make(leaf.shape[::-1] if origin.transposed else leaf.shape)


def test_loaded_weights_are_copies():
    config = load_target(FOLDER / "llama_linear_bias", dtype="float32").target.config
    plan = hf_plan(config, ["model.embed_tokens.weight", "lm_head.weight"])
    arrays: list[np.ndarray] = []

    def make(shape: tuple[int, ...]) -> np.ndarray:
        arrays.append(aligned(shape))
        return arrays[-1]

    params = read_leaves(
        decoder_leaves(config, jnp.dtype("float32")),
        plan,
        Memory(config, plan, make),
        decoder_units(config),
        None,
    )
    for array in arrays:
        array[...] = 1

    assert not any(np.asarray(leaf).any() for leaf in params)


def test_only_one_leaf_is_in_memory_besides_the_loaded_ones():
    config = load_target(FOLDER / "llama_linear_bias", dtype="float32").target.config
    plan = hf_plan(config, ["model.embed_tokens.weight", "lm_head.weight"])
    alive: list[weakref.ref] = []

    def make(shape: tuple[int, ...]) -> np.ndarray:
        assert not [ref for ref in alive if ref() is not None], "an earlier tensor is still held"
        values = np.zeros(shape, np.float32).view(Watched)
        alive.append(weakref.ref(values))
        return values

    read_leaves(
        decoder_leaves(config, jnp.dtype("float32")),
        plan,
        Memory(config, plan, make),
        decoder_units(config),
        None,
    )

    assert len(alive) == len(plan.origins)
