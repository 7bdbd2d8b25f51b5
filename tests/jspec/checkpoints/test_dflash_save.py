"""Drafters written and read back: both layouts, both methods, bit for bit."""

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_files import HIDDEN, VOCABULARY, config, config2, tensors, tensors2, write
from safetensors.numpy import load_file, save_file

from jspec.checkpoints.dflash import load_dflash
from jspec.checkpoints.dflash_save import save_dflash
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash2 import dflash2
from jspec.targets.rope import Divisors, Linear, Llama3, Rope, Yarn

SPECULATORS = dict(layout="speculators", target_name="org/target", target_architectures=["LlamaForCausalLM"])
LAYOUTS: dict[str, dict[str, Any]] = {"sglang": {}, "speculators": SPECULATORS}


@pytest.fixture(params=["dflash", "dflash2"])
def loaded(request, tmp_path) -> LoadedDrafter:
    folder = tmp_path / "in"
    folder.mkdir()
    files = {"dflash": (config(), tensors()), "dflash2": (config2(), tensors2())}
    return load_dflash(write(folder, *files[request.param]), jnp.float32)


def equal(one: LoadedDrafter, other: LoadedDrafter) -> bool:
    assert other.drafter == one.drafter
    return all(
        ours.dtype == theirs.dtype and np.array_equal(ours, theirs)
        for ours, theirs in zip(one.params, other.params, strict=True)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_is_written_reads_back_bit_for_bit(tmp_path, loaded, layout):
    folder = tmp_path / "out" / "drafter"
    save_dflash(folder, loaded.drafter.config, loaded.params, **LAYOUTS[layout])
    assert equal(loaded, load_dflash(folder, jnp.float32))
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_weights_can_be_read_by_whom_the_umask_lets(tmp_path, loaded, umask):
    before = os.umask(umask)
    try:
        save_dflash(tmp_path / "out", loaded.drafter.config, loaded.params)
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "out").iterdir()}
    assert modes == dict.fromkeys(("config.json", "model.safetensors"), 0o666 & ~umask)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bfloat16_weights_read_back_bit_for_bit(tmp_path, loaded, layout):
    save_dflash(tmp_path / "a", loaded.drafter.config, loaded.params, dtype=jnp.bfloat16, **LAYOUTS[layout])
    narrow = load_dflash(tmp_path / "a", jnp.bfloat16)
    save_dflash(tmp_path / "b", narrow.drafter.config, narrow.params, **LAYOUTS[layout])
    assert equal(narrow, load_dflash(tmp_path / "b", jnp.bfloat16))
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (
        tmp_path / "b" / "model.safetensors"
    ).read_bytes()
    for wide, short in zip(loaded.params, narrow.params, strict=True):
        np.testing.assert_array_equal(wide.astype(short.dtype), short)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["dtype"] == "bfloat16"


def test_tensors_have_the_names_and_layout_of_the_checkpoint(tmp_path, loaded):
    save_dflash(tmp_path / "out", loaded.drafter.config, loaded.params)
    expected = load_file(tmp_path / "in" / "model.safetensors")
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(written[name], array)


def test_config_of_sglang_states_everything(tmp_path):
    (tmp_path / "in").mkdir()
    nested = dict(output_multiplier=0.5, final_logit_softcapping=7.0)
    loaded = load_dflash(write(tmp_path / "in", config2(dflash_config=nested), tensors2()), jnp.float32)
    save_dflash(tmp_path / "out", loaded.drafter.config, loaded.params)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["DFlash2DraftModel"]
    assert values["dflash_config"] == {
        "block_size": 6,
        "conv_group_size": 4,
        "conv_kernel_size": 2,
        "final_logit_softcapping": 7.0,
        "mask_token_id": 9,
        "output_multiplier": 0.5,
        "selector_rank": 3,
        "selector_top_k": 5,
        "target_layer_ids": [1, 3, -1],
    }
    assert (values["block_size"], values["num_target_layers"], values["is_causal"]) == (6, 5, False)
    assert values["layer_types"] == ["full_attention", "sliding_attention"]
    assert (values["sliding_window"], values["use_sliding_window"]) == (7, True)
    assert values["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert (values["rope_theta"], values["rope_scaling"]) == (10000.0, None)


def test_config_of_speculators_counts_states_from_the_embedding(tmp_path, loaded):
    save_dflash(tmp_path / "out", loaded.drafter.config, loaded.params, **SPECULATORS)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    kind = loaded.drafter.name
    assert values["speculators_model_type"] == values["speculators_config"]["algorithm"] == kind
    assert values["aux_hidden_state_layer_ids"] == [2, 4, 0]
    assert values["draft_vocab_size"] == values["transformer_layer_config"]["vocab_size"] == VOCABULARY
    assert values["sliding_window_non_causal"] == (kind == "dflash2")
    assert values["speculators_config"]["verifier"] == {
        "name_or_path": "org/target",
        "architectures": ["LlamaForCausalLM"],
    }
    (method,) = values["speculators_config"]["proposal_methods"]
    assert (method["proposal_type"], method["speculative_tokens"]) == ("greedy", 5)


@pytest.mark.parametrize(
    "rope",
    [
        Linear(factor=2.0),
        Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=32),
        Yarn(factor=4.0, original_context=16, attention_factor=1.2, beta_slow=2.0, truncate=False),
    ],
    ids=lambda rope: type(rope).__name__,
)
@pytest.mark.parametrize("window", [None, Rope(theta=20.0)], ids=["one rope", "two"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_rope_rule_reads_back(tmp_path, rope, window, layout):
    loaded = load_dflash(write(tmp_path, config(), tensors()), jnp.float32)
    kind, scaled = loaded.drafter.config, Rope(theta=500.0, scaling=rope)
    decoder = dataclasses.replace(kind.decoder, full_rope=scaled, window_rope=window or scaled)
    kind = dataclasses.replace(kind, decoder=decoder)
    save_dflash(tmp_path / "out", kind, loaded.params, **LAYOUTS[layout])
    assert load_dflash(tmp_path / "out", jnp.float32).drafter.config == kind


def changed(loaded: LoadedDrafter, decoder: dict[str, Any] | None = None, **changes: Any) -> Any:
    kind = loaded.drafter.config
    layers = dataclasses.replace(kind.decoder, **(decoder or {}))
    return dataclasses.replace(kind, decoder=layers, **changes)


@pytest.mark.parametrize(
    ("change", "layout", "message"),
    [
        (dict(decoder=dict(query_scale=1.0)), "sglang", r"config.query_scale: .* got 1\.0, which would read"),
        (dict(decoder=dict(output_bias=True)), "sglang", "config.output_bias: .* got True"),
        (dict(decoder=dict(sandwich_norms=True)), "sglang", "config.sandwich_norms: .* got True"),
        (
            dict(decoder=dict(full_rope=Rope(theta=1e4, scaling=Divisors(values=(1.0,))))),
            "sglang",
            "config.decoder.full_rope: expected a rule with a name, got Divisors",
        ),
        (dict(is_causal=True), "speculators", "config.is_causal: expected False or None, got True"),
        (dict(own_embedding=True), "speculators", "config.own_embedding: expected False"),
    ],
    ids=str,
)
def test_what_a_layout_cannot_say_is_refused(tmp_path, change, layout, message):
    loaded = load_dflash(write(tmp_path, config(), tensors()), jnp.float32)
    kind = changed(loaded, **change)
    params = loaded.params
    if kind.own_embedding or change.get("decoder", {}).keys() & {"output_bias", "sandwich_norms"}:
        leaves = dflash_leaves(kind, jnp.dtype(jnp.float32))
        params = tuple(jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves)
    with pytest.raises(ValueError, match=message):
        save_dflash(tmp_path / "out", kind, params, **LAYOUTS[layout])
    assert not (tmp_path / "out").exists()


def test_an_own_embedding_is_written_and_read_back(tmp_path):
    arrays = tensors() | {"embed_tokens.weight": np.ones((VOCABULARY, HIDDEN), np.float32)}
    loaded = load_dflash(write(tmp_path, config(sample_from_anchor=True), arrays), jnp.float32)
    save_dflash(tmp_path / "out", loaded.drafter.config, loaded.params)
    assert equal(loaded, load_dflash(tmp_path / "out", jnp.float32))


def test_a_full_folder_is_left_alone(tmp_path, loaded):
    (tmp_path / "in" / "note").write_text("keep")
    before = sorted(path.name for path in (tmp_path / "in").iterdir())
    with pytest.raises(ValueError, match=r"folder: expected a new or empty one, got .*/in"):
        save_dflash(tmp_path / "in", loaded.drafter.config, loaded.params)
    assert sorted(path.name for path in (tmp_path / "in").iterdir()) == before


def test_a_failure_leaves_nothing_behind(tmp_path, loaded, monkeypatch):
    def full(*args: Any, **options: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jspec.checkpoints.dflash_save.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        save_dflash(tmp_path / "deep" / "out", loaded.drafter.config, loaded.params)
    assert list((tmp_path / "deep").iterdir()) == []


def test_further_files_come_along_but_not_in_place_of_the_drafter(tmp_path, loaded):
    kind = loaded.drafter.config
    save_dflash(tmp_path / "out", kind, loaded.params, files={"README.md": "figures"})
    assert (tmp_path / "out" / "README.md").read_text() == "figures"
    with pytest.raises(ValueError, match=r"files: expected other names than config.json"):
        save_dflash(tmp_path / "other", kind, loaded.params, files={"config.json": "{}"})


def test_params_of_another_drafter_are_refused(tmp_path, loaded):
    with pytest.raises(ValueError, match=r"params: expected .* arrays of"):
        save_dflash(tmp_path / "out", loaded.drafter.config, loaded.params[:-1])


def reduced(tmp_path: Path, ids: list[int]) -> tuple[Path, LoadedDrafter]:
    """A drafter of a part of the vocabulary, written."""
    loaded = load_dflash(write(tmp_path, config2(), tensors2()), jnp.float32)
    kind = dataclasses.replace(loaded.drafter.config, draft_vocab_size=len(ids))
    names = [leaf.path for leaf in dflash_leaves(kind, jnp.dtype(jnp.float32))]
    params = list(loaded.params)
    params.insert(names.index("draft_ids"), jnp.asarray(ids, jnp.int32))
    folder = tmp_path / "out"
    save_dflash(folder, kind, tuple(params))
    return folder, dataclasses.replace(loaded, drafter=dflash2(kind), params=tuple(params))


def test_a_part_of_the_vocabulary_reads_back(tmp_path):
    folder, saved = reduced(tmp_path, [0, 2, 3, 7, 9])
    assert equal(saved, load_dflash(folder, jnp.float32))


@pytest.mark.parametrize(
    ("ids", "complaint"),
    [
        ([0, 2, 3, 7, 10], "'draft_ids': expected ids from 0 to 9, got 10 at column 4"),
        ([-1, 2, 3, 7, 9], "'draft_ids': expected ids from 0 to 9, got -1 at column 0"),
        (
            [0, 2, 2, 7, 9],
            "'draft_ids': expected ascending ids without repetition, got 2 after 2 at column 2",
        ),
    ],
    ids=["past the end", "negative", "repeated"],
)
def test_ids_that_cannot_be_are_refused(tmp_path, ids, complaint):
    folder, _ = reduced(tmp_path, ids)
    with pytest.raises(ValueError, match=complaint):
        load_dflash(folder, jnp.float32)


def test_ids_that_are_no_integers_are_refused(tmp_path):
    folder, _ = reduced(tmp_path, [0, 2, 3, 7, 9])
    arrays = load_file(folder / "model.safetensors")
    save_file(arrays | {"draft_ids": arrays["draft_ids"].astype(np.float32)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match="tensor 'draft_ids' as one of I64, I32, got F32; it holds ids"):
        load_dflash(folder, jnp.float32)
