"""DFlash checkpoints as published: names, layouts and everything that must be refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_files import HIDDEN, VOCABULARY, config, tensors, write

from jspec.checkpoints.dflash import load_dflash
from jspec.drafters.dflash import dflash_leaves


def fused(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    arrays = dict(arrays)
    for i in range(2):
        parts = [arrays.pop(f"layers.{i}.self_attn.{name}_proj.weight") for name in "qkv"]
        arrays[f"layers.{i}.self_attn.qkv_proj.weight"] = np.concatenate(parts)
        parts = [arrays.pop(f"layers.{i}.mlp.{name}_proj.weight") for name in ("gate", "up")]
        arrays[f"layers.{i}.mlp.gate_up_proj.weight"] = np.concatenate(parts)
    return arrays


def prefixed(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {f"model.{name}": array for name, array in arrays.items()}


def aliased(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return {names.get(name, name): array for name, array in arrays.items()}


def test_every_tensor_lands_where_it_belongs(tmp_path):
    arrays = tensors()
    loaded = load_dflash(write(tmp_path, config(), arrays), jnp.float32)
    leaves = dflash_leaves(loaded.drafter.config, jnp.dtype(jnp.float32))
    named = {leaf.path: np.asarray(array) for leaf, array in zip(leaves, loaded.params, strict=True)}
    np.testing.assert_array_equal(named["fc"], arrays["fc.weight"].T)
    np.testing.assert_array_equal(named["hidden_norm"], arrays["hidden_norm.weight"])
    for leaf, tensor in (("query", "q_proj"), ("key", "k_proj"), ("value", "v_proj"), ("output", "o_proj")):
        expected = arrays[f"layers.1.self_attn.{tensor}.weight"].T
        np.testing.assert_array_equal(named[f"layers.1.attention.{leaf}"], expected)
    np.testing.assert_array_equal(named["layers.0.mlp.up"], arrays["layers.0.mlp.up_proj.weight"].T)
    assert len(loaded.params) == len(arrays)


def test_config_says_what_the_drafter_does(tmp_path):
    drafter = load_dflash(write(tmp_path, config(is_causal=False), tensors()), jnp.float32).drafter
    assert drafter.features == ("layer.1", "layer.3", "embedding")
    assert drafter.draft_length == 5
    assert drafter.config.target_hidden_size == HIDDEN
    assert drafter.config.num_target_layers == 5
    assert drafter.config.is_causal is False
    assert drafter.config.decoder.layer_kinds == ("full", "window")
    assert drafter.config.decoder.window == 7
    assert drafter.config.decoder.max_context == 64
    assert not drafter.config.own_embedding


def test_draft_length_below_the_block_is_kept(tmp_path):
    folder = write(tmp_path, config(), tensors())
    assert load_dflash(folder, jnp.float32, 3).drafter.draft_length == 3
    with pytest.raises(ValueError, match="draft_length: expected 1 to 5"):
        load_dflash(folder, jnp.float32, 6)


@pytest.mark.parametrize("layout", [fused, prefixed, aliased, lambda arrays: prefixed(fused(arrays))])
def test_all_layouts_give_the_same_weights(tmp_path, layout):
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    plain = load_dflash(write(tmp_path / "plain", config(), tensors()), jnp.float32)
    other = load_dflash(write(tmp_path / "other", config(), layout(tensors())), jnp.float32)
    assert plain.drafter == other.drafter
    for expected, array in zip(plain.params, other.params, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_settings_may_stand_inside_or_beside_dflash_config(tmp_path):
    inside = config(
        block_size="absent", num_target_layers="absent", dflash_config=dict(block_size=6, num_target_layers=5)
    )
    beside = config(
        dflash_config=dict(mask_token_id="absent", target_layer_ids="absent"),
        mask_token_id=9,
        target_layer_ids=[1, 3, -1],
    )
    drafters = [
        load_dflash(write(tmp_path, values, tensors()), jnp.float32).drafter
        for values in (config(), inside, beside)
    ]
    assert drafters[0] == drafters[1] == drafters[2]


def test_own_embedding_is_read_if_the_checkpoint_has_one(tmp_path):
    arrays = tensors() | {"embed_tokens.weight": np.ones((VOCABULARY, HIDDEN), np.float32)}
    loaded = load_dflash(write(tmp_path, config(), arrays), jnp.float32)
    assert loaded.drafter.config.own_embedding
    assert (VOCABULARY, HIDDEN) in {array.shape for array in loaded.params}


def test_weights_take_the_dtype_and_norms_stay_float32(tmp_path):
    loaded = load_dflash(write(tmp_path, config(), tensors()), jnp.bfloat16)
    assert {(array.ndim, array.dtype.name) for array in loaded.params} == {(1, "float32"), (2, "bfloat16")}


def test_without_layer_types_all_layers_are_full(tmp_path):
    values = config(layer_types="absent", sliding_window=None, use_sliding_window=False, max_window_layers=2)
    loaded = load_dflash(write(tmp_path, values, tensors()), jnp.float32)
    assert loaded.drafter.config.decoder.layer_kinds == ("full", "full")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(architectures=["DFlash2DraftModel"]),
            "selector_rank and selector_top_k: expected positive integers for DFlash2DraftModel, got None",
        ),
        (dict(architectures=["DFlashDraftModel", "Other"]), "architectures: .* not supported yet"),
        (dict(architectures=["EagleDraftModel"]), "architectures: .*EagleDraftModel.* not supported yet"),
        (dict(architectures="absent"), "architectures: expected .* got None"),
        (dict(model_type="llama"), "model_type: expected 'qwen3', got 'llama'"),
        (dict(block_size="absent"), "block_size: expected an integer from 2 on, got None"),
        (dict(block_size=1), "block_size: expected an integer from 2 on, got 1"),
        (dict(dflash_config=dict(mask_token_id="absent")), "mask_token_id: .* got None"),
        (
            dict(dflash_config=dict(mask_token_id=10)),
            "mask_token_id: expected an integer from 0 to 9, got 10",
        ),
        (dict(dflash_config=dict(target_layer_ids="absent")), "target_layer_ids: .* no safe default"),
        (dict(dflash_config=dict(target_layer_ids=[1, -2, 3])), "target_layer_ids: .* got"),
        (
            dict(dflash_config=dict(block_size=8)),
            "block_size: expected one value, got 8 in dflash_config and 6",
        ),
        (dict(dflash_config=dict(projector_type="tango")), "projector_type: .*'tango'; not supported yet"),
        (dict(sample_from_anchor="yes"), "sample_from_anchor: expected true, false or null, got 'yes'"),
        (dict(dflash_config=dict(shift_label=True)), "shift_label: expected none for DFlashDraftModel"),
        (dict(dflash_config=dict(markov_rank=4)), "markov_rank: expected none for DFlashDraftModel, got 4"),
        (
            dict(dflash_config=dict(conv_kernel_size=2)),
            "conv_kernel_size: expected it together with conv_group_size, got 2 and None",
        ),
        (
            dict(dflash_config=dict(selector_rank=2, selector_top_k=3)),
            "selector_rank and selector_top_k: expected none for DFlashDraftModel, got 2 and 3",
        ),
        (dict(dflash_config=dict(causal=True), is_causal=False), "is_causal: .* got .*False"),
        (dict(dflash_config=dict(attention_sink_bias=True)), "attention_sink_bias: .* not supported yet"),
        (dict(attention_value_scale=0.5), "attention_value_scale: .* got 0.5; not supported yet"),
        (dict(logit_scale=0.5), "logit_scale: expected no such key"),
        (dict(is_causal="yes"), "is_causal: expected true, false or null, got 'yes'"),
        (dict(vocab_size="absent"), "vocab_size: expected a value"),
        (dict(rope_theta="absent"), "rope_theta: expected a number"),
        (dict(sliding_window=None), "sliding_window: expected a positive integer"),
        (dict(use_sliding_window=False), "sliding_window: .* use_sliding_window"),
        (
            dict(layer_types="absent", use_sliding_window=True),
            "layer_types: expected the kind of every layer",
        ),
    ],
    ids=str,
)
def test_a_config_that_is_not_understood_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_dflash(write(tmp_path, config(**changes), tensors()), jnp.float32)


def without(name: str) -> dict[str, np.ndarray]:
    return {key: array for key, array in tensors().items() if key != name}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            without("layers.1.self_attn.q_norm.weight"),
            "expected tensor 'layers.1.self_attn.q_norm.weight', got none",
        ),
        (without("fc.weight"), r"expected 'fc.weight' of shape \[hidden, 3 x target's hidden\].* got none"),
        (
            tensors() | {"lm_head.weight": np.ones((VOCABULARY, HIDDEN))},
            "expected no tensor 'lm_head.weight'",
        ),
        (
            prefixed(tensors() | {"lm_head.weight": np.ones((VOCABULARY, HIDDEN))}),
            "expected no tensor 'model.lm_head.weight';",
        ),
        (
            fused(tensors()) | {"layers.0.self_attn.qkv_proj.bias": np.ones(16)},
            "expected no tensor 'layers.0.self_attn.qkv_proj.bias';",
        ),
        (
            tensors() | {"layers.0.self_attn.k_proj.weight": np.ones((8, HIDDEN))},
            r"expected shape \[4, 8\] for tensor 'layers.0.self_attn.k_proj.weight', got \[8, 8\]",
        ),
        (tensors() | {"fc.weight": np.ones((HIDDEN, 25))}, r"got \[8, 25\]"),
        (
            fused(tensors()) | {"layers.0.self_attn.qkv_proj.weight": np.ones((17, HIDDEN))},
            r"expected 16 rows in .*qkv_proj.* \(q_proj 8, k_proj 4, v_proj 4\), got shape \[17, 8\]",
        ),
        (
            fused(tensors()) | {"layers.0.self_attn.k_proj.weight": np.ones((4, HIDDEN))},
            "expected one tensor for 'layers.0.self_attn.k_proj.weight'",
        ),
        (
            tensors() | {"embed_tokens.weight": np.ones((VOCABULARY + 1, HIDDEN))},
            r"expected shape \[10, 8\] for tensor 'embed_tokens.weight', got \[11, 8\]",
        ),
    ],
    ids=[
        "missing",
        "no fc",
        "own head",
        "prefixed head",
        "fused bias",
        "wrong shape",
        "fc width",
        "fused rows",
        "twice",
        "embedding",
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, arrays, message):
    arrays = {name: array.astype(np.float32) for name, array in arrays.items()}
    with pytest.raises(ValueError, match=message) as error:
        load_dflash(write(tmp_path, config(), arrays), jnp.float32)
    assert "model.safetensors" in str(error.value)


def test_quantised_weights_are_refused(tmp_path):
    arrays = tensors()
    arrays["layers.0.mlp.up_proj.weight"] = arrays["layers.0.mlp.up_proj.weight"].astype(np.int8)
    with pytest.raises(ValueError, match=r"'layers.0.mlp.up_proj.weight' as one of .* got I8"):
        load_dflash(write(tmp_path, config(), arrays), jnp.float32)


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"path: expected config.json in .* got none"):
        load_dflash(tmp_path, jnp.float32)


def test_a_convolution_may_come_without_a_selector(tmp_path):
    nested = dict(conv_kernel_size=3, conv_group_size=2)
    arrays = tensors()
    for i in range(2):
        for conv in ("attention_conv", "mlp_conv"):
            arrays[f"layers.{i}.{conv}.base_kernel"] = np.ones((2, 3, HIDDEN), np.float32)
            arrays[f"layers.{i}.{conv}.kernel_projection.weight"] = np.ones((24, HIDDEN), np.float32)
    drafter = load_dflash(write(tmp_path, config(dflash_config=nested), arrays), jnp.float32).drafter
    assert drafter.name == "dflash"
    assert (drafter.config.convolution.taps, drafter.config.convolution.group_size) == (3, 2)


def test_anchor_row_predicts_if_the_config_says_so(tmp_path):
    loaded = load_dflash(write(tmp_path, config(sample_from_anchor=True), tensors()), jnp.float32)
    assert loaded.drafter.config.anchor_predicts
    assert loaded.drafter.draft_length == 6


@pytest.mark.parametrize(
    "name", ["DFlashDraftModel", "MuseGlimmerAssistantModel"], ids=["name", "other name"]
)
def test_other_names_of_the_architecture(tmp_path, name):
    assert load_dflash(write(tmp_path, config(architectures=[name]), tensors()), jnp.float32).drafter


def deepspec(**changes):
    values = config(
        architectures=["Qwen3DSparkModel"],
        dflash_config={"mask_token_id": "absent", "target_layer_ids": "absent"},
        mask_token_id=9,
        target_layer_ids=[1, 3, -1],
        num_anchors=512,
        markov_rank=0,
        enable_confidence_head=False,
        layer_types=["full_attention", "full_attention"],
        sliding_window=None,
        use_sliding_window=False,
        max_window_layers=2,
        pad_token_id=0,
    )
    return {k: v for k, v in (values | changes).items() if k != "dflash_config"}


def deepspec_tensors():
    table = np.random.default_rng(2).normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
    return tensors() | {"embed_tokens.weight": table, "lm_head.weight": table}


def test_deepspec_drafts_from_the_anchor_row_and_brings_copies_of_the_tables(tmp_path):
    loaded = load_dflash(write(tmp_path, deepspec(), deepspec_tensors()), jnp.float32)
    kind = loaded.drafter.config
    assert kind.anchor_predicts and kind.own_embedding
    assert (loaded.drafter.draft_length, kind.block_size, kind.mask_token_id) == (6, 6, 9)
    assert kind.target_layer_ids == (1, 3, -1)
    assert len(loaded.params) == len(deepspec_tensors()) - 1  # the head is the target's
