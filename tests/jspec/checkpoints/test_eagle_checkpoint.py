"""EAGLE checkpoints as published: layouts, the two meanings of norm_output, and what must be refused."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from eagle_files import (
    DRAFTED,
    HIDDEN,
    IDS,
    LAYERS,
    TARGET_HIDDEN,
    VOCABULARY,
    config,
    draw,
    eagle_config,
    eagle_tensors,
    layer,
    renamed,
    tensors,
    write,
)

from jspec.checkpoints.drafter import load_drafter
from jspec.checkpoints.eagle import load_eagle
from jspec.drafters.eagle import Eagle
from jspec.drafters.eagle_net import eagle_net
from jspec.drafters.tree_shape import dynamic_tree


def load(folder, values=None, arrays=None, **options):
    return load_eagle(write(folder, values or config(), arrays or tensors()), jnp.float32, **options)


def fused(arrays: dict[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    """With one tensor for queries, keys and values, and one for both halves of the MLP, as SGLang holds them."""
    arrays = dict(arrays)
    for name, parts in (
        ("self_attn.qkv_proj", ("q", "k", "v")),
        ("mlp.gate_up_proj", ("gate", "up")),
    ):
        owner = name.split(".")[0]
        names = [f"{prefix}.{owner}.{part}_proj.weight" for part in parts]
        arrays[f"{prefix}.{name}.weight"] = np.concatenate([arrays.pop(part) for part in names])
    return arrays


def test_leaves_hold_the_tensors(tmp_path):
    loaded, arrays = load(tmp_path), tensors()
    net, kind = eagle_net(loaded.drafter.config, loaded.params), loaded.drafter.config
    assert kind.features == ("layer.1", "layer.3", "layer.4")
    assert (kind.own_head, kind.own_embedding, kind.draft_vocab_size) == (True, True, DRAFTED)
    assert net.head is not None and net.embedding is not None and net.draft_ids is not None
    np.testing.assert_array_equal(net.head[...], arrays["lm_head.weight"].T)
    np.testing.assert_array_equal(net.embedding[...], arrays["embed_tokens.weight"])
    np.testing.assert_array_equal(net.draft_ids[...], IDS)
    np.testing.assert_array_equal(
        net.layers[0].attention.query[...], arrays["midlayer.self_attn.q_proj.weight"].T
    )
    np.testing.assert_array_equal(net.layers[0].state_norm[...], arrays["midlayer.hidden_norm.weight"])


@pytest.mark.parametrize(
    "layout",
    [
        lambda arrays: renamed(arrays, ("midlayer", "model.layers.0"), ("fc", "model.fc")),
        lambda arrays: renamed(arrays, ("midlayer", "layers.0")),
        lambda arrays: fused(arrays, "midlayer"),
        lambda arrays: arrays | {"verifier_norm.weight": np.ones((HIDDEN,), np.float32)},
    ],
    ids=["sglang", "layers", "fused", "speculators"],
)
def test_all_names_of_a_tensor_mean_the_same(tmp_path, layout):
    plain = load(tmp_path / "plain")
    other = load(tmp_path / "other", arrays=layout(tensors()))
    assert other.drafter == plain.drafter
    for ours, theirs in zip(plain.params, other.params, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(
    ("norm_output", "name", "meaning", "reads", "feeds"),
    [
        (..., "midlayer", None, True, False),
        (True, "midlayer", None, True, False),
        (False, "midlayer", None, False, False),
        (..., "layers.0", None, True, False),
        (True, "layers.0", None, True, True),
        (False, "layers.0", None, True, False),
        (True, "midlayer", "sglang", True, True),
        (False, "layers.0", "specforge", False, False),
    ],
)
def test_norm_output_means_what_its_layout_means(tmp_path, norm_output, name, meaning, reads, feeds):
    arrays = renamed(tensors(), ("midlayer", name))
    kind = load(tmp_path, config(norm_output=norm_output), arrays, norm_output=meaning).drafter.config
    assert (kind.head_reads_norm, kind.feeds_back_norm) == (reads, feeds)


def test_norms_before_fc(tmp_path):
    random = np.random.default_rng(3)
    norms = [draw(random, (TARGET_HIDDEN,)) for _ in range(3)]
    named = {f"fc_norm.{i}.weight": norm for i, norm in enumerate(norms)}
    legacy = {f"aux_norm_{at}.weight": norm for at, norm in zip(("low", "mid", "high"), norms, strict=True)}
    one = load(tmp_path / "a", config(fc_norm=True), tensors() | named)
    other = load(tmp_path / "b", config(use_aux_norm=True), tensors() | legacy)
    assert one.drafter == other.drafter and one.drafter.config.feature_norms
    np.testing.assert_array_equal(eagle_net(one.drafter.config, one.params).feature_norms[2][...], norms[2])
    np.testing.assert_array_equal(eagle_net(one.drafter.config, other.params).feature_norms[0][...], norms[0])
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "norm_before_fc": True}
    arrays = tensors() | {"input_norm.weight": draw(random, (3 * TARGET_HIDDEN,))}
    assert load(tmp_path / "c", config(eagle_config=nested), arrays).drafter.config.norm_before_fc


def test_usual_layers_come_from_the_target(tmp_path):
    kind = load(tmp_path, config(eagle_config=...), num_target_layers=12).drafter.config
    assert kind.features == ("layer.1", "layer.5", "layer.8") and kind.num_target_layers == 12
    with pytest.raises(ValueError, match="expected the captured layers inside eagle_config, got none"):
        load(tmp_path, config(eagle_config=...))


def test_without_embedding_and_head_the_targets_are_used(tmp_path):
    arrays = tensors()
    del arrays["embed_tokens.weight"], arrays["lm_head.weight"]
    arrays["fc.weight"] = np.ones((HIDDEN, 3 * HIDDEN), np.float32)
    kind = load(tmp_path, config(target_hidden_size=...), arrays).drafter.config
    assert not kind.own_embedding and not kind.own_head and kind.draft_vocab_size == DRAFTED
    with pytest.raises(ValueError, match="target_hidden_size: expected the drafter's hidden size 8, got 6"):
        arrays["fc.weight"] = tensors()["fc.weight"]
        load(tmp_path, config(), arrays)


def test_tied_head_is_the_embedding(tmp_path):
    arrays = tensors()
    for name in ("lm_head.weight", "d2t", "t2d"):
        del arrays[name]
    loaded = load(tmp_path, config(tie_word_embeddings=True, draft_vocab_size=...), arrays)
    net = eagle_net(loaded.drafter.config, loaded.params)
    assert net.head is not None
    np.testing.assert_array_equal(net.head[...], arrays["embed_tokens.weight"].T)


def test_whole_vocabulary_with_its_trivial_mapping(tmp_path):
    arrays = tensors() | {
        "lm_head.weight": np.zeros((VOCABULARY, HIDDEN), np.float32),
        "d2t": np.zeros((VOCABULARY,), np.int64),
        "t2d": np.ones((VOCABULARY,), np.bool_),
    }
    assert load(tmp_path, config(draft_vocab_size=VOCABULARY), arrays).drafter.config.draft_vocab_size is None


def test_eagle_of_safeailab_and_of_sglang(tmp_path):
    plain = load(tmp_path / "a", eagle_config(), eagle_tensors())
    assert plain.drafter.config.features == ("final_norm",) and plain.drafter.config.fc_bias
    biases = {
        f"layers.0.self_attn.{p}_proj.bias": np.ones((n,), np.float32)
        for p, n in zip("qkv", (8, 4, 4), strict=True)
    }
    arrays = {k: v for k, v in (eagle_tensors() | biases).items() if k != "fc.bias"}
    kind = load(tmp_path / "b", eagle_config(bias=False, qkv_bias=True), arrays).drafter.config
    assert kind.decoder.qkv_bias and not kind.fc_bias
    prefixed = {f"model.{name}": array for name, array in eagle_tensors().items()}
    values = eagle_config(architectures=["LlamaForCausalLMEagle"])
    assert load(tmp_path / "c", values, prefixed).drafter == plain.drafter


def speculators(kind: str, **values: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {"algorithm": kind},
        "architectures": ["Whatever"],
        "transformer_layer_config": LAYERS,
        **values,
    }


def test_speculators_layouts(tmp_path):
    arrays = renamed(tensors(), ("midlayer", "layers.0"))
    values = speculators(
        "eagle3",
        draft_vocab_size=DRAFTED,
        target_hidden_size=TARGET_HIDDEN,
        norm_before_residual=True,
        eagle_aux_hidden_state_layer_ids=[2, 4, 5],
    )
    kind = load(tmp_path / "a", values, arrays).drafter.config
    expected = load(tmp_path / "b").drafter.config
    assert kind == dataclasses.replace(expected, norm_before_residual=True)
    arrays = renamed(eagle_tensors(), ("layers.0", "transformer"), ("fc", "fusion_fc"))
    old = load(tmp_path / "c", speculators("eagle", fusion_bias=True, layernorms=False), arrays)
    assert old.drafter == load(tmp_path / "d", eagle_config(), eagle_tensors()).drafter
    with pytest.raises(ValueError, match="layernorms: expected False or none, got True"):
        load(tmp_path / "c", speculators("eagle", layernorms=True), arrays)
    with pytest.raises(ValueError, match="norm_before_residual: expected true or false, got None"):
        load(tmp_path / "c", speculators("eagle3"), tensors())


def test_deepspec_reads_the_embedding_in_every_layer(tmp_path):
    arrays = {k: v for k, v in tensors().items() if not k.startswith(("midlayer", "d2t", "t2d"))}
    for i in range(2):
        arrays |= layer(f"layers.{i}", 2 * HIDDEN, norms=("input_layernorm", "hidden_norm"))
        arrays |= {f"layers.{i}.self_attn.{n}_norm.weight": np.ones((2,), np.float32) for n in "qk"}
    arrays["lm_head.weight"] = np.zeros((VOCABULARY, HIDDEN), np.float32)
    arrays["fc.weight"] = np.zeros((HIDDEN, 4 * HIDDEN), np.float32)
    values = LAYERS | {
        "architectures": ["Qwen3Eagle3Model"],
        "model_type": "qwen3",
        "num_hidden_layers": 2,
        "draft_num_hidden_layers": 2,
        "target_layer_ids": [1, 2, 3, 5],
        "num_target_layers": 7,
        "ttt_length": 4,
        "attention_bias": False,
    }
    kind = load(tmp_path, values, arrays).drafter.config
    assert (kind.wide_layers, kind.decoder.query_key_norm, kind.num_target_layers) == ("all", True, 7)
    assert kind.features == ("layer.1", "layer.2", "layer.3", "layer.5")


def peagle() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    arrays = {k: v for k, v in tensors().items() if not k.startswith("midlayer")}
    arrays |= layer("layers.0", 2 * HIDDEN, norms=("input_layernorm", "hidden_norm"))
    arrays |= layer("layers.1", HIDDEN, norms=("input_layernorm",))
    arrays["mask_hidden"] = draw(np.random.default_rng(5), (1, 1, 3 * TARGET_HIDDEN))
    return config(architectures=["PEagleDraftModel"], num_hidden_layers=2), arrays


def test_peagle_needs_its_mask_token(tmp_path):
    values, arrays = peagle()
    loaded = load(tmp_path, values, arrays, mask_token_id=23)
    net = eagle_net(loaded.drafter.config, loaded.params)
    assert net.mask_hidden is not None
    np.testing.assert_array_equal(net.mask_hidden[...], arrays["mask_hidden"][0, 0])
    assert load(tmp_path, values | {"ptd_token_id": 3}, arrays).drafter.config.mask_token_id == 3
    with pytest.raises(
        ValueError, match="mask_token_id: expected the id that stands for unknown tokens, got none"
    ):
        load(tmp_path, values, arrays)
    with pytest.raises(ValueError, match="mask_token_id: expected the config's 3 or None, got 4"):
        load(tmp_path, values | {"mask_token_id": 3}, arrays, mask_token_id=4)
    with pytest.raises(
        ValueError, match="mask_token_id: expected none without a tensor 'mask_hidden', got 4"
    ):
        load(tmp_path / "plain", mask_token_id=4)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (dict(d2t=None), "expected tensor 'd2t' for 10 of 24 ids, got none"),
        (dict(d2t=IDS[:9] - np.arange(9)), r"expected 10 entries in 'd2t'.* got shape \[9\]"),
        (dict(d2t=np.where(np.arange(10) == 9, 15, IDS - np.arange(10))), "ids 0 to 23 .* got 24"),
        (dict(d2t=np.where(np.arange(10) == 0, -1, IDS - np.arange(10))), "ids 0 to 23 .* got -1"),
        (
            dict(d2t=np.where(np.arange(10) == 4, 1, IDS - np.arange(10))),
            "each target id once from 'd2t', got 5 for draft id 3 and 5 for 4",
        ),
        (
            dict(d2t=np.where(np.arange(10) == 4, 0, IDS - np.arange(10))),
            "ascending target ids from 'd2t', got 5 for draft id 3 and 4 for 4",
        ),
        (dict(d2t=IDS), "ids 0 to 23 .* got 27"),  # ids in place of differences
        (dict(t2d=np.arange(VOCABULARY) < 10), "'t2d' to be true for the 10 ids .* 10 that differ in 8"),
        (dict(t2d=np.ones((23,), np.bool_)), r"expected 24 entries in 't2d', got shape \[23\]"),
        (dict(d2t=(IDS - np.arange(10)).astype(np.float32)), "'d2t' as one of I64, I32, got F32"),
    ],
)
def test_wrong_vocabulary_mappings_are_refused(tmp_path, changes, problem):
    arrays = {k: v for k, v in (tensors() | changes).items() if v is not None}
    with pytest.raises(ValueError, match=problem):
        load(tmp_path, arrays=arrays)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (
            dict(eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 3, 4, 6]}),
            r"fc.weight: expected 4 captured states of target_hidden_size 6, so 4 x 6 = 24 columns, got shape \[8, 18\]",
        ),
        (
            dict(num_aux_hidden_states=2),
            r"num_aux_hidden_states: expected 3 for the layers \[1, 3, 4\], got 2",
        ),
        (dict(target_hidden_size=7), r"so 3 x 7 = 21 columns"),
        (dict(eagle_config={"eagle_aux_hidden_state_layer_ids": "1"}), "expected a list of 0-based layer"),
        (dict(eagle_config={"fancy": 1}), "eagle_config: expected no key 'fancy', got 1"),
        (dict(eagle_aux_hidden_state_layer_ids=[2, 4, 5]), "expected it inside eagle_config"),
        (dict(draft_vocab_size=25), "draft_vocab_size: expected 2 to the vocabulary's 24, got 25"),
        (dict(tie_word_embeddings=True), "tie_word_embeddings: expected false with draft_vocab_size 10"),
        (dict(fc_norm=1), "fc_norm: expected true, false or null, got 1"),
        (dict(fc_norm=True, use_aux_norm=False), "fc_norm: expected one value"),
        (dict(fc_norm=True), r"expected tensor 'fc_norm.0.weight' \(and 2 more\), got none"),
        (dict(bias=True), "expected tensor 'fc.bias', got none"),
        (dict(num_hidden_layers=2), "expected tensor 'layers.1.input_layernorm.weight'"),
        (dict(model_type="gemma3"), "model_type: expected llama or qwen2 or qwen3, got 'gemma3'"),
        (dict(new_maths=3), "new_maths: expected no such key"),
        (
            dict(rope_scaling={"rope_type": "dynamic", "factor": 2.0}),
            "rope_type: expected one of .* got dynamic; no other rule is supported: use",
        ),
        (
            dict(rope_scaling={"type": "mrope", "mrope_section": [1, 1, 2]}),
            "rope_type: expected one of default, linear, llama3, yarn, got mrope; no other rule",
        ),
        (
            dict(rope_scaling={"type": "default", "mrope_section": [1, 1, 2]}),
            r"rope_scaling: expected no key 'mrope_section' for rope_type 'default', got \[1, 1, 2\]; remove it",
        ),
        (
            dict(sliding_window=8),
            "layer_types: expected the kind of every layer with sliding_window 8, got none",
        ),
        (
            dict(layer_types=["sliding_attention"]),
            "sliding_window: expected a positive integer for the sliding layers, got None",
        ),
        (dict(layer_types=["full_attention"] * 2), "layer_types: expected 1 of full_attention or"),
        (dict(architectures=["Other"]), r"architectures: expected one of .* got \['Other'\]"),
    ],
)
def test_configs_that_change_the_maths_are_refused(tmp_path, changes, problem):
    with pytest.raises(ValueError, match=problem):
        load(tmp_path, config(**changes))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda arrays: arrays.pop("norm.weight"), "expected tensor 'norm.weight', got none"),
        (lambda arrays: arrays.update(extra=np.ones((2,), np.float32)), "expected no tensor 'extra'"),
        (
            lambda arrays: arrays.update({"lm_head.weight": np.ones((9, HIDDEN), np.float32)}),
            r"expected shape \[10, 8\] for tensor 'lm_head.weight', got \[9, 8\]",
        ),
        (
            lambda arrays: arrays.update({"layers.0.hidden_norm.weight": np.ones((HIDDEN,), np.float32)}),
            "expected one tensor for 'layers.0.hidden_norm.weight'",
        ),
    ],
)
def test_tensors_that_are_not_the_configs_are_refused(tmp_path, change, problem):
    arrays = tensors()
    change(arrays)
    with pytest.raises(ValueError, match=problem):
        load(tmp_path, arrays=arrays)


def test_any_drafter_folder_is_recognised(tmp_path):
    tree = dynamic_tree(width=2, depth=2, draft_length=4)
    folder = write(tmp_path / "eagle3", config(eagle_config=...), tensors())
    loaded = load_drafter(folder, jnp.float32, tree=tree, num_target_layers=9)
    assert isinstance(loaded.drafter, Eagle) and loaded.drafter.shape == tree
    assert loaded.drafter.features == ("layer.1", "layer.3", "layer.5")
    folder = write(tmp_path / "eagle", eagle_config(), eagle_tensors())
    assert load_drafter(folder, jnp.float32, draft_length=2).drafter.draft_length == 2
    folder = write(tmp_path / "other", config(architectures=["MedusaModel"]), tensors())
    with pytest.raises(
        ValueError, match=r"one of the architectures LlamaForCausalLMEagle, .*DFlash.* \['Medusa"
    ):
        load_drafter(folder, jnp.float32)
