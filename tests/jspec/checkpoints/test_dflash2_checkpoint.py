"""DFlash 2 checkpoints as published: keys, names, and everything that must be refused."""

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_files import HIDDEN, VOCABULARY, config2, tensors, tensors2, write

from jspec.checkpoints.dflash import load_dflash
from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash2 import DFlash2
from jspec.drafters.dflash2_layers import Convolution, Selector
from jspec.loading import resolve_drafter


def test_every_tensor_lands_where_it_belongs(tmp_path):
    arrays = tensors2()
    loaded = load_dflash(write(tmp_path, config2(), arrays), jnp.float32)
    assert isinstance(loaded.drafter, DFlash2)
    leaves = dflash_leaves(loaded.drafter.config, jnp.dtype(jnp.float32))
    named = {leaf.path: np.asarray(array) for leaf, array in zip(leaves, loaded.params, strict=True)}
    for conv in ("layers.1.attention_conv", "layers.0.mlp_conv"):
        np.testing.assert_array_equal(named[f"{conv}.base_kernel"], arrays[f"{conv}.base_kernel"])
        projection = arrays[f"{conv}.kernel_projection.weight"].T
        np.testing.assert_array_equal(named[f"{conv}.kernel_projection"], projection)
    for name in ("candidate_selector.predecessor_codebook", "candidate_selector.successor_codebook"):
        np.testing.assert_array_equal(named[name], arrays[name])
    projection = arrays["candidate_selector.hidden_projection.weight"].T
    np.testing.assert_array_equal(named["candidate_selector.hidden_projection"], projection)
    assert len(loaded.params) == len(arrays)


def test_a_folders_architecture_chooses_the_drafter(tmp_path):
    folder = write(tmp_path, config2(), tensors2())
    drafter, params = resolve_drafter(str(folder), (), 3, jnp.float32, None)
    assert isinstance(drafter, DFlash2)
    assert (drafter.draft_length, len(params)) == (3, len(tensors2()))


def test_config_says_what_the_drafter_does(tmp_path):
    drafter = load_dflash(write(tmp_path, config2(), tensors2()), jnp.float32).drafter
    kind = drafter.config
    assert (drafter.name, drafter.draft_length, kind.block_size) == ("dflash2", 5, 6)
    assert kind.convolution == Convolution(taps=2, group_size=4)
    assert kind.selector == Selector(rank=3, top_k=5)
    assert (kind.output_multiplier, kind.final_softcap, kind.is_causal) == (1.0, None, False)
    assert kind.identity.startswith("DFlash 2, 2 layers, hidden 8")


@pytest.mark.parametrize(
    ("nested", "expected"),
    [
        (dict(output_multiplier=0.8, final_logit_softcapping=6), (0.8, 6.0)),
        (dict(output_multiplier=1, final_logit_softcapping=0), (1.0, None)),
        (dict(output_multiplier=None, final_logit_softcapping=None), (1.0, None)),
    ],
    ids=str,
)
def test_transform_of_the_logits(tmp_path, nested, expected):
    kind = load_dflash(write(tmp_path, config2(dflash_config=nested), tensors2()), jnp.float32).drafter.config
    assert (kind.output_multiplier, kind.final_softcap) == expected


@pytest.mark.parametrize("name", ["DFlash2BeamDraftModel", "MiniMaxDFlash2DraftModel"])
def test_other_names_of_the_architecture(tmp_path, name):
    folder = write(tmp_path, config2(architectures=[name]), tensors2())
    assert isinstance(load_dflash(folder, jnp.float32).drafter, DFlash2)


def test_settings_may_stand_beside_dflash_config(tmp_path):
    inside = load_dflash(write(tmp_path, config2(), tensors2()), jnp.float32).drafter
    names = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k", "block_size")
    values = config2()
    beside = values | {name: values["dflash_config"].pop(name) for name in names}
    assert load_dflash(write(tmp_path, beside, tensors2()), jnp.float32).drafter == inside


def test_codebooks_may_be_embeddings_and_names_prefixed(tmp_path):
    renamed = {
        f"model.{name}.weight" if name.endswith("codebook") else f"model.{name}": array
        for name, array in tensors2().items()
    }
    (tmp_path / "plain").mkdir()
    (tmp_path / "other").mkdir()
    plain = load_dflash(write(tmp_path / "plain", config2(), tensors2()), jnp.float32)
    other = load_dflash(write(tmp_path / "other", config2(), renamed), jnp.float32)
    for expected, array in zip(plain.params, other.params, strict=True):
        np.testing.assert_array_equal(array, expected)


def test_kernels_stay_float32_and_codebooks_take_the_dtype(tmp_path):
    loaded = load_dflash(write(tmp_path, config2(), tensors2()), jnp.bfloat16)
    dtypes = {(array.ndim, array.dtype.name) for array in loaded.params}
    assert dtypes == {(1, "float32"), (2, "bfloat16"), (3, "float32")}


@pytest.mark.parametrize("name", sorted(set(tensors2()) - set(tensors())))
def test_a_missing_tensor_is_refused_by_name(tmp_path, name):
    arrays = {key: array for key, array in tensors2().items() if key != name}
    with pytest.raises(ValueError, match=f"expected tensor '{name}', got none"):
        load_dflash(write(tmp_path, config2(), arrays), jnp.float32)


@pytest.mark.parametrize(
    ("nested", "message"),
    [
        (dict(selector_rank="absent"), "selector_rank: expected it together with selector_top_k"),
        (dict(selector_rank=0, selector_top_k=0), "expected positive integers for DFlash2DraftModel"),
        (dict(selector_rank=1.5), r"selector_rank: expected an integer from 1 on, got 1\.5"),
        (dict(selector_top_k=11), "selector_top_k: expected at most the 10 ids that are drafted, got 11"),
        (dict(conv_kernel_size=7), "conv_kernel_size: expected 1 to the block_size 6, got 7"),
        (dict(conv_group_size=3), "conv_group_size: expected a divisor of the hidden_size 8, got 3"),
        (dict(conv_group_size=0), "conv_kernel_size: expected it together with conv_group_size"),
        (dict(output_multiplier=-1), "output_multiplier: expected a positive number, got -1"),
        (dict(final_logit_softcapping="7"), "final_logit_softcapping: expected a positive number, got '7'"),
        (dict(sample_from_anchor=True), "sample_from_anchor: .* DFlash2DraftModel, got True"),
        (dict(beam_width=4), "dflash_config: expected no key 'beam_width', got 4"),
    ],
    ids=str,
)
def test_a_config_that_is_not_understood_is_refused(tmp_path, nested, message):
    with pytest.raises(ValueError, match=message):
        load_dflash(write(tmp_path, config2(dflash_config=nested), tensors2()), jnp.float32)


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (
            "candidate_selector.successor_codebook",
            (VOCABULARY - 1, 3),
            r"expected shape \[10, 3\] for tensor 'candidate_selector.successor_codebook', got \[9, 3\]",
        ),
        ("layers.0.mlp_conv.base_kernel", (2, 3, HIDDEN), r"expected shape \[2, 2, 8\].* got \[2, 3, 8\]"),
        ("candidate_selector.bias", (3,), "expected no tensor 'candidate_selector.bias'"),
        ("prefix_gru.weight_ih_l0", (3, 3), "expected no tensor 'prefix_gru.weight_ih_l0'"),
    ],
)
def test_tensors_that_do_not_fit_are_refused_by_name(tmp_path, name, shape, message):
    arrays = tensors2() | {name: np.ones(shape, np.float32)}
    with pytest.raises(ValueError, match=message):
        load_dflash(write(tmp_path, config2(), arrays), jnp.float32)
