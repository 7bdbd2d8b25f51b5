"""EAGLE drafters written and read back: every layout, bit for bit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec.checkpoints.eagle import load_eagle
from jspec.checkpoints.eagle_save import check_savable, layout_of, save_eagle
from jspec.drafters.eagle_init import eagle_config_for, init_eagle_params
from jspec.drafters.eagle_net import EagleConfig, eagle_net
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Linear, Llama3, Rope, Yarn

TARGET = DecoderConfig(
    architecture="llama",
    vocab_size=20,
    hidden_size=8,
    intermediate_size=12,
    num_layers=10,
    num_heads=4,
    num_kv_heads=2,
    head_size=2,
    norm_eps=1e-5,
    max_context=64,
    full_rope=Rope(
        theta=500.0,
        scaling=Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16),
    ),
    layer_kinds=("full",) * 10,
    query_scale=2**-0.5,
)
REDUCED = dict(kind="eagle3", draft_vocab_size=5, own_head=True)
KINDS = {
    "eagle": ("eagle", dict(kind="eagle", fc_bias=True, num_layers=2)),
    "eagle3": ("sglang", REDUCED),
    "eagle3, targets tables": ("sglang", dict(kind="eagle3", draft_vocab_size=5, norm_before_fc=True)),
    "eagle3 fed back": ("sglang", REDUCED | dict(feeds_back_norm=True, feature_norms=True, fc_bias=True)),
    "eagle3, two layers": ("sglang", REDUCED | dict(num_layers=2, own_embedding=True)),
    "eagle3 raw": ("specforge", REDUCED | dict(head_reads_norm=False)),
    "narrow": ("sglang", REDUCED | dict(own_embedding=True, hidden_size=4, num_heads=2, num_kv_heads=1)),
    "eagle3, window layers": (
        "sglang",
        REDUCED | dict(num_layers=2, layer_kinds=("window", "full"), window=5, query_key_norm=False),
    ),
    "eagle3, all windows": ("sglang", REDUCED | dict(window=5)),
    "deepspec": (
        "deepspec",
        dict(
            kind="eagle3",
            own_head=True,
            own_embedding=True,
            query_key_norm=True,
            wide_layers="all",
            num_layers=2,
            layer_kinds=("full", "window"),
            window=7,
            target_layer_ids=[-1, 1, 2, 9],
        ),
    ),
    "peagle": (
        "peagle",
        REDUCED | dict(own_embedding=True, num_layers=3, mask_token_id=19, norm_before_residual=True),
    ),
}


def made(options) -> tuple[EagleConfig, tuple[jax.Array, ...]]:
    config = eagle_config_for(TARGET, **options)
    ids = None if config.draft_vocab_size is None else jnp.array([0, 3, 4, 11, 19])
    return config, init_eagle_params(config, jax.random.key(1), jnp.float32, draft_ids=ids)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
def test_what_is_written_reads_back_bit_for_bit(tmp_path, name, dtype):
    layout, options = KINDS[name]
    config, params = made(options)
    assert layout_of(config) == layout
    check_savable(config)
    save_eagle(tmp_path / "out", config, params, dtype=dtype)
    loaded = load_eagle(tmp_path / "out", dtype)
    assert loaded.drafter.config == config
    for wide, read in zip(params, loaded.params, strict=True):
        np.testing.assert_array_equal(wide.astype(read.dtype), read)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == jnp.dtype(dtype).name
    states = jax.random.normal(jax.random.key(2), (3, config.decoder.hidden_size)).astype(dtype)
    head = lambda hidden: hidden.astype(jnp.float32)  # noqa: E731
    given = tuple(p.astype(r.dtype) for p, r in zip(params, loaded.params, strict=True))
    one, other = (eagle_net(config, p).logits(states, head) for p in (given, loaded.params))
    np.testing.assert_array_equal(one, other)


def test_the_files_are_what_the_public_programs_read(tmp_path):
    config, params = made(REDUCED)
    save_eagle(tmp_path / "a", config, params, files={"note.json": "{}"})
    values, arrays = (
        json.loads((tmp_path / "a" / "config.json").read_text()),
        load_file(tmp_path / "a" / "model.safetensors"),
    )
    assert values["architectures"] == ["LlamaForCausalLMEagle3"] and "norm_output" not in values
    assert values["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 4, 6]
    assert values["rope_scaling"]["rope_type"] == "llama3"
    assert arrays["d2t"].tolist() == [0, 2, 2, 8, 15] and arrays["d2t"].dtype == np.int64
    assert np.flatnonzero(arrays["t2d"]).tolist() == [0, 3, 4, 11, 19]
    assert arrays["midlayer.self_attn.q_proj.weight"].shape == (8, 16)
    assert "embed_tokens.weight" not in arrays and (tmp_path / "a" / "note.json").read_text() == "{}"
    fed_back, params = made(REDUCED | dict(feeds_back_norm=True))
    save_eagle(tmp_path / "b", fed_back, params)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["norm_output"] is True
    assert "layers.0.hidden_norm.weight" in load_file(tmp_path / "b" / "model.safetensors")


@pytest.mark.parametrize("name", ["eagle3", "eagle3, window layers", "eagle3 fed back", "narrow", "peagle"])
def test_speculators_folders_read_back(tmp_path, name):
    options = {key: value for key, value in KINDS[name][1].items() if key != "fc_bias"}
    config, params = made(options)
    save_eagle(tmp_path / "a", config, params, layout="speculators", target_name="org/target")
    loaded = load_eagle(tmp_path / "a", jnp.float32)
    assert loaded.drafter.config == config
    for ours, theirs in zip(params, loaded.params, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_speculators_folder_is_what_that_library_and_vllm_read(tmp_path):
    config, params = made(REDUCED | dict(norm_before_residual=True))
    save_eagle(tmp_path / "a", config, params, layout="speculators", target_name="org/target")
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    assert values["speculators_model_type"] == "eagle3" and values["architectures"] == ["Eagle3DraftModel"]
    assert values["eagle_aux_hidden_state_layer_ids"] == [2, 5, 7]  # 0 is the embedding
    assert (values["draft_vocab_size"], values["target_hidden_size"]) == (5, None)
    assert values["norm_before_residual"] is True
    layers = values["transformer_layer_config"]
    assert (layers["model_type"], layers["vocab_size"], layers["num_hidden_layers"]) == ("llama", 20, 1)
    assert not {"eagle_config", "draft_vocab_size", "architectures", "norm_before_residual"} & set(layers)
    # What vLLM wants to find.
    assert values["speculators_config"]["verifier"]["name_or_path"] == "org/target"
    assert values["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 5
    names = set(load_file(tmp_path / "a" / "model.safetensors"))
    assert {
        "d2t",
        "t2d",
        "fc.weight",
        "lm_head.weight",
        "norm.weight",
        "layers.0.hidden_norm.weight",
    } <= names
    assert not any(name.startswith("midlayer") for name in names)


@pytest.mark.parametrize(
    ("options", "layout", "problem"),
    [
        (
            KINDS["eagle3 raw"][1],
            "sglang",
            "config.head_reads_norm: expected a value that layout sglang can say",
        ),
        (REDUCED | dict(feeds_back_norm=True), "specforge", "config.feeds_back_norm: .* got True"),
        (KINDS["peagle"][1], "sglang", "mask_token_id: expected the id"),
        (REDUCED, "deepspec", "model_type: expected qwen3, got 'llama'"),
        (
            dict(kind="eagle"),
            "speculators",
            r"config: expected EAGLE-3 or P-EAGLE .* got \(EAGLE, .* write eagle",
        ),
        (
            dict(kind="eagle3", draft_vocab_size=5),
            "speculators",
            "config.own_head: expected True for layout speculators",
        ),
        (
            KINDS["eagle3 raw"][1],
            "speculators",
            "config.head_reads_norm: .* got False, which would read back",
        ),
        (REDUCED | dict(fc_bias=True), "speculators", "config.fc_bias: expected .* got True"),
    ],
)
def test_a_layout_that_cannot_say_it_is_refused(tmp_path, options, layout, problem):
    config, params = made(options)
    for write in (
        lambda: check_savable(config, layout),
        lambda: save_eagle(tmp_path / "out", config, params, layout=layout),
    ):
        with pytest.raises(ValueError, match=problem):
            write()
    assert not (tmp_path / "out").exists()


def test_only_speculators_names_its_target(tmp_path):
    config, params = made(REDUCED)
    with pytest.raises(ValueError, match="target_name: expected none for layout sglang, got 'org/target'"):
        save_eagle(tmp_path / "out", config, params, target_name="org/target")


def test_params_of_another_config_are_refused(tmp_path):
    config, params = made(REDUCED)
    with pytest.raises(ValueError, match="params: expected 14 arrays of"):
        save_eagle(tmp_path / "out", config, params[1:])


@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=10.0),
        Rope(theta=10.0, scaling=Linear(factor=2.0)),
        Rope(theta=10.0, scaling=Yarn(factor=4.0, original_context=16, attention_factor=1.1)),
    ],
    ids=str,
)
def test_rope_rules_read_back(tmp_path, rope):
    config, params = made(dict(kind="eagle", num_layers=2, layer_kinds=("full", "window"), window=3))
    config = dataclasses.replace(config, decoder=dataclasses.replace(config.decoder, full_rope=rope))
    save_eagle(tmp_path / "two bases", config, params)  # the window layers turn as the target's did
    assert load_eagle(tmp_path / "two bases", jnp.float32).drafter.config == config
    decoder = dataclasses.replace(config.decoder, window_rope=rope)
    config = dataclasses.replace(config, decoder=decoder)
    save_eagle(tmp_path / "out", config, params)
    assert load_eagle(tmp_path / "out", jnp.float32).drafter.config == config
