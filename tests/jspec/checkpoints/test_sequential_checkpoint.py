"""DSpark and Domino checkpoints: every layout in and out, the anchor's declaration, and what is refused."""

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_files import HIDDEN, VOCABULARY, config, tensors, write
from safetensors.numpy import load_file

from jspec.checkpoints.dflash import load_dflash
from jspec.checkpoints.dflash_save import save_dflash
from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.domino import Domino
from jspec.drafters.domino_head import Gru
from jspec.drafters.dspark import DSpark
from jspec.drafters.dspark_heads import Confidence, Markov

RANK, SIZE = 3, 4
WIDTHS = {
    "vanilla": (),
    "gated": ("gate_proj", RANK, HIDDEN + RANK),
    "rnn": ("joint_proj", 3 * RANK, HIDDEN + 2 * RANK),
}


def markov(kind: str = "gated", **changes):
    """Keys of DSpark's heads."""
    sizes = dict(markov_rank=RANK, markov_head_type=kind)
    return sizes | dict(enable_confidence_head=True, confidence_head_with_markov=True) | changes


def markov_tensors(kind: str = "gated", reads_token: bool = True) -> dict[str, np.ndarray]:
    shapes: dict[str, tuple[int, ...]] = {
        "markov_head.markov_w1.weight": (VOCABULARY, RANK),
        "markov_head.markov_w2.weight": (VOCABULARY, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK * reads_token),
        "confidence_head.proj.bias": (1,),
    }
    if WIDTHS[kind]:
        name, rows, columns = WIDTHS[kind]
        shapes |= {f"markov_head.{name}.weight": (rows, columns), f"markov_head.{name}.bias": (rows,)}
    random = np.random.default_rng(3)
    return tensors() | {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def specforge(**changes):
    nested = dict(projector_type="dspark", attention_mode="gqa", confidence_head_alpha=1.0) | markov(
        **changes
    )
    return config(architectures=["DSparkDraftModel"], dflash_config=nested)


def sglang(**changes):
    return config(architectures=["DSparkDraftModel"], sample_from_anchor=True) | markov(**changes)


def deepspec():
    flat = config(architectures=["Qwen3DSparkModel"], num_anchors=512) | markov()
    own = flat.pop("dflash_config")
    return flat | own


def domino(**changes):
    nested = dict(
        projector_type="domino", gru_hidden_dim=SIZE, emb_dim=RANK, pure_draft_prefix_len=1, shift_label=True
    )
    return config(architectures=["DominoDraftModel"], dflash_config=nested | changes)


def domino_tensors() -> dict[str, np.ndarray]:
    shapes = {
        "prefix_gru.weight_ih_l0": (3 * SIZE, HIDDEN),
        "prefix_gru.weight_hh_l0": (3 * SIZE, SIZE),
        "embed_proj.0.weight": (RANK, HIDDEN + SIZE),
        "embed_proj.2.weight": (VOCABULARY, RANK),
    }
    random = np.random.default_rng(4)
    return tensors() | {name: random.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def named(loaded):
    leaves = dflash_leaves(loaded.drafter.config, jnp.dtype(jnp.float32))
    return {leaf.path: np.asarray(array) for leaf, array in zip(leaves, loaded.params, strict=True)}


def equal(one, other):
    assert other.drafter == one.drafter
    return all(np.array_equal(a, b) for a, b in zip(one.params, other.params, strict=True))


@pytest.mark.parametrize("kind", WIDTHS)
def test_every_tensor_of_the_heads_lands_where_it_belongs(tmp_path, kind):
    arrays = markov_tensors(kind)
    loaded = load_dflash(write(tmp_path, specforge(kind=kind), arrays), jnp.float32)
    assert isinstance(loaded.drafter, DSpark) and loaded.drafter.draft_length == 6
    assert loaded.drafter.config.head == Markov(rank=RANK, kind=kind)
    assert loaded.drafter.config.confidence == Confidence(reads_token=True)
    leaves = named(loaded)
    np.testing.assert_array_equal(leaves["head.embedding"], arrays["markov_head.markov_w1.weight"])
    np.testing.assert_array_equal(leaves["head.output"], arrays["markov_head.markov_w2.weight"].T)
    np.testing.assert_array_equal(leaves["confidence_head.weight"], arrays["confidence_head.proj.weight"].T)
    if WIDTHS[kind]:
        np.testing.assert_array_equal(leaves["head.mix"], arrays[f"markov_head.{WIDTHS[kind][0]}.weight"].T)


def test_specforge_sglang_and_deepspec_say_the_same(tmp_path):
    loaded = []
    for name, values in (("specforge", specforge()), ("sglang", sglang()), ("deepspec", deepspec())):
        (tmp_path / name).mkdir()
        loaded.append(load_dflash(write(tmp_path / name, values, markov_tensors()), jnp.float32))
    assert loaded[0].drafter.config.anchor_predicts
    assert equal(loaded[0], loaded[1]) and equal(loaded[0], loaded[2])


def test_sglangs_block_without_a_predicting_anchor_has_one_row_more(tmp_path):
    values = sglang() | dict(sample_from_anchor=False)
    loaded = load_dflash(write(tmp_path, values, markov_tensors()), jnp.float32)
    assert not loaded.drafter.config.anchor_predicts
    assert (loaded.drafter.config.block_size, loaded.drafter.draft_length) == (7, 6)
    save_dflash(tmp_path / "out", loaded.drafter.config, loaded.params)
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["block_size"], written["sample_from_anchor"]) == (6, False)
    assert equal(loaded, load_dflash(tmp_path / "out", jnp.float32))


def test_without_a_key_the_confidence_reads_the_token_as_in_sglang(tmp_path):
    values = {k: v for k, v in sglang().items() if k != "confidence_head_with_markov"}
    loaded = load_dflash(write(tmp_path, values, markov_tensors()), jnp.float32)
    assert loaded.drafter.config.confidence == Confidence(reads_token=True)
    with pytest.raises(
        ValueError, match=r"shape \[1, 11\] for tensor 'confidence_head.proj.weight', got \[1, 8\]"
    ):
        load_dflash(write(tmp_path, values, markov_tensors(reads_token=False)), jnp.float32)


@pytest.mark.parametrize("architecture", ["DominoDraftModel", "DFlashDraftModel"])
@pytest.mark.parametrize("old", [False, True], ids=["names", "old names"])
def test_domino_is_read_under_all_its_names(tmp_path, architecture, old):
    arrays = domino_tensors()
    heads = ("prefix_gru", "embed_proj")
    stored = {f"logit_head.{k}" if old and k.startswith(heads) else k: v for k, v in arrays.items()}
    values = domino() | dict(architectures=[architecture])
    loaded = load_dflash(write(tmp_path, values, stored), jnp.float32)
    assert isinstance(loaded.drafter, Domino)
    assert loaded.drafter.config.head == Gru(size=SIZE, rank=RANK)
    assert loaded.drafter.config.anchor_predicts and loaded.drafter.draft_length == 6
    leaves = named(loaded)
    np.testing.assert_array_equal(leaves["head.gru_input"], arrays["prefix_gru.weight_ih_l0"].T)
    np.testing.assert_array_equal(leaves["head.gru_state"], arrays["prefix_gru.weight_hh_l0"].T)
    np.testing.assert_array_equal(leaves["head.mix"], arrays["embed_proj.0.weight"].T)
    np.testing.assert_array_equal(leaves["head.output"], arrays["embed_proj.2.weight"].T)


@pytest.mark.parametrize(
    ("values", "arrays"),
    [
        (specforge(kind="rnn"), markov_tensors("rnn")),
        (domino(), domino_tensors()),
        (domino(shift_label=False), domino_tensors()),
    ],
    ids=["dspark", "domino", "domino, row 0 dropped"],
)
def test_what_is_written_reads_back_bit_for_bit_and_says_it_in_both_places(tmp_path, values, arrays):
    loaded = load_dflash(write(tmp_path, values, arrays), jnp.float32)
    save_dflash(tmp_path / "out", loaded.drafter.config, loaded.params)
    assert equal(loaded, load_dflash(tmp_path / "out", jnp.float32))
    written = load_file(tmp_path / "out" / "model.safetensors")
    assert set(written) == set(arrays)
    for name, array in arrays.items():
        np.testing.assert_array_equal(written[name], array)
    stated = json.loads((tmp_path / "out" / "config.json").read_text())
    assert stated["architectures"] == values["architectures"]
    keys = {"sample_from_anchor", "projector_type"} | (
        set(markov()) if "markov_rank" in stated else {"shift_label", "gru_hidden_dim", "emb_dim"}
    )
    for key in keys:
        assert stated[key] == stated["dflash_config"][key]


def test_deepspec_is_written_with_the_targets_tables(tmp_path):
    loaded = load_dflash(write(tmp_path, specforge(), markov_tensors()), jnp.float32)
    table = np.random.default_rng(5).normal(size=(VOCABULARY, HIDDEN)).astype(np.float32)
    copies = {"embed_tokens.weight": table, "lm_head.weight": table}
    kind = loaded.drafter.config
    save_dflash(tmp_path / "out", kind, loaded.params, layout="deepspec", target_tensors=copies)
    values = json.loads((tmp_path / "out" / "config.json").read_text())
    assert values["architectures"] == ["Qwen3DSparkModel"] and "dflash_config" not in values
    assert (values["markov_rank"], values["target_layer_ids"], values["block_size"]) == (RANK, [1, 3, -1], 6)
    again = load_dflash(tmp_path / "out", jnp.float32)
    assert again.drafter.config == dataclasses.replace(kind, own_embedding=True)
    assert {k: v.tolist() for k, v in named(again).items() if k != "embedding"} == {
        k: v.tolist() for k, v in named(loaded).items()
    }
    for options, message in (
        (dict(layout="deepspec"), "target_tensors: expected embed_tokens.weight and lm_head.weight of shape"),
        (dict(target_tensors=copies), "target_tensors: expected none for layout sglang"),
        (
            dict(layout="speculators", target_name="org/target"),
            "config: expected DFlash or DFlash 2 for layout speculators",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            save_dflash(tmp_path / "other", kind, loaded.params, **options)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            domino(shift_label=None),
            'shift_label: expected true or false, got none; .* add "shift_label": true',
        ),
        (domino(shift_label=1), "shift_label: expected true, false or null, got 1"),
        (
            domino() | dict(sample_from_anchor=False),
            "sample_from_anchor: expected shift_label's True or none",
        ),
        (domino(gru_hidden_dim=None), "gru_hidden_dim: expected an integer from 1 on, got None"),
        (domino(emb_dim=0), "emb_dim: expected an integer from 1 on, got 0"),
        (domino(markov_rank=3), "markov_rank: expected none for DominoDraftModel, got 3"),
        (specforge(kind="lstm"), "markov_head_type: expected one of vanilla, gated, rnn, got 'lstm'"),
        (specforge(markov_rank=-1), "markov_rank: expected an integer from 0 on, got -1"),
        (specforge(enable_confidence_head="yes"), "enable_confidence_head: expected true, false or null"),
        (specforge() | dict(markov_rank=4), "markov_rank: expected one value, got 3 in dflash_config and 4"),
        (sglang() | dict(shift_label=True), "shift_label: expected none for DSparkDraftModel, got True"),
        (sglang() | dict(projector_type="domino"), "projector_type: .* got 'domino'"),
        (
            sglang() | dict(sample_from_anchor="no"),
            "sample_from_anchor: expected true, false or null, got 'no'",
        ),
    ],
)
def test_a_config_that_is_not_understood_is_refused(tmp_path, values, message):
    with pytest.raises(ValueError, match=message):
        load_dflash(write(tmp_path, values, markov_tensors()), jnp.float32)


@pytest.mark.parametrize(
    ("kind", "arrays", "message"),
    [
        (
            "rnn",
            markov_tensors("gated"),
            "expected tensor 'markov_head.joint_proj.bias' .and 1 more., got none",
        ),
        ("vanilla", markov_tensors("gated"), "expected no tensor 'markov_head.gate_proj.bias'"),
    ],
)
def test_a_head_of_another_kind_is_named(tmp_path, kind, arrays, message):
    with pytest.raises(ValueError, match=message):
        load_dflash(write(tmp_path, specforge(kind=kind), arrays), jnp.float32)
