"""Fresh weights, and DFlash 2 made of DFlash."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_definition import named_weights
from block_engine import HIDDEN, VOCABULARY, config
from training_data import tiny_target

from jspec.drafters.dflash import dflash_leaves, dflash_net
from jspec.drafters.dflash2_layers import Convolution, Selector
from jspec.drafters.dflash_init import (
    dflash_config_for,
    init_dflash_params,
    init_from_target,
    upgrade_dflash_params,
)
from jspec.targets.decoder import decoder_leaves
from jspec.targets.layers import rms_norm

ADDED = dict(convolution=Convolution(taps=3, group_size=4), selector=Selector(rank=5, top_k=4))


def test_matrices_are_normal_and_everything_else_neutral():
    kind = config(bias=True, **ADDED)
    named = named_weights(kind, init_dflash_params(kind, jax.random.key(0), jnp.float32))
    normal = {name: value for name, value in named.items() if np.ptp(value) and "base_kernel" not in name}
    assert {name.rpartition(".")[2] for name in normal} == {
        *("fc", "query", "key", "value", "output", "gate", "up", "down"),
        *("predecessor_codebook", "hidden_projection"),
    }
    np.testing.assert_allclose(np.std(np.concatenate([v.ravel() for v in normal.values()])), 0.02, rtol=0.05)
    assert all((value == 1).all() for name, value in named.items() if name.endswith("norm"))
    assert not any(value.any() for name, value in named.items() if name.endswith("bias"))
    for conv in ("attention_conv", "mlp_conv"):
        kernel = named[f"layers.1.{conv}.base_kernel"]
        assert (kernel[:, 0] == 1).all() and not kernel[:, 1:].any()
        assert not named[f"layers.1.{conv}.kernel_projection"].any()
    assert not named["candidate_selector.successor_codebook"].any()


def test_a_leaf_depends_on_key_and_name_alone():
    plain, more = config(), config(**ADDED)
    key = jax.random.key(3)
    ours = named_weights(plain, init_dflash_params(plain, key, jnp.float32))
    theirs = named_weights(more, init_dflash_params(more, key, jnp.float32))
    for name, value in ours.items():
        np.testing.assert_array_equal(theirs[name], value)
    assert not np.array_equal(theirs["layers.0.attention.query"], theirs["layers.1.attention.query"])
    other = named_weights(plain, init_dflash_params(plain, jax.random.key(4), jnp.float32))
    assert not np.array_equal(other["fc"], ours["fc"])


def test_norms_and_kernels_stay_float32():
    kind = config(**ADDED)
    params = init_dflash_params(kind, jax.random.key(0), jnp.bfloat16)
    leaves = dflash_leaves(kind, jnp.dtype(jnp.bfloat16))
    assert [array.dtype for array in params] == [leaf.dtype for leaf in leaves]
    wide = {leaf.path.rpartition(".")[2] for leaf in leaves if leaf.dtype == jnp.float32}
    assert "base_kernel" in wide and "kernel_projection" not in wide


def test_an_own_embedding_is_copied_and_only_an_own_one():
    own, shared, table = config(own_embedding=True), config(), jnp.ones((VOCABULARY, HIDDEN))
    named = named_weights(own, init_dflash_params(own, jax.random.key(0), jnp.float32, table))
    assert (named["embedding"] == 1).all()
    with pytest.raises(ValueError, match=r"embedding: expected an array of shape \[16, 12\], got None"):
        init_dflash_params(own, jax.random.key(0), jnp.float32)
    with pytest.raises(ValueError, match=r"embedding: expected None, got shape \[16, 12\]"):
        init_dflash_params(shared, jax.random.key(0), jnp.float32, table)


def test_upgrade_keeps_every_weight_and_starts_the_rest_fresh():
    plain, more = config(bias=True), config(bias=True, final_softcap=5.0, **ADDED)
    params = tuple(
        p + 1 for p in init_dflash_params(plain, jax.random.key(0), jnp.float32)
    )  # unlike fresh ones
    upgraded = upgrade_dflash_params(plain, params, more, jax.random.key(1), jnp.float32)
    before, after = named_weights(plain, params), named_weights(more, upgraded)
    fresh = named_weights(more, init_dflash_params(more, jax.random.key(1), jnp.float32))
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name] if name in before else fresh[name])


@pytest.mark.parametrize("change", [dict(block_size=4), dict(mask_token_id=3), dict(target_layer_ids=(0, 1))])
def test_upgrade_of_another_drafter_is_refused(change):
    plain = config()
    params = init_dflash_params(plain, jax.random.key(0), jnp.float32)
    other = dataclasses.replace(config(**ADDED), **change)
    with pytest.raises(ValueError, match=r"config: expected \(DFlash, 2 layers.*that differs in more"):
        upgrade_dflash_params(plain, params, other, jax.random.key(0), jnp.float32)


def test_a_drafter_that_begins_with_the_target_makes_the_targets_values_of_the_context():
    frozen = tiny_target()
    target, hidden = frozen.target.config, frozen.target.hidden_size
    kind = dflash_config_for(target, block_size=4, mask_token_id=31, target_layer_ids=(1, 4), num_layers=1)
    fresh = init_dflash_params(kind, jax.random.key(0), jnp.float32)
    params = init_from_target(kind, fresh, target, frozen.params)
    theirs = dict(
        zip(
            (leaf.path for leaf in decoder_leaves(target, jnp.dtype(jnp.float32))), frozen.params, strict=True
        )
    )
    before_last = jax.random.normal(jax.random.key(1), (5, hidden))  # what the target's layer 5 reads
    features = jnp.concatenate([jnp.full((5, hidden), 9.0), before_last], axis=1)
    _, values = dflash_net(kind, params).context_rows(features, jnp.arange(5))
    normed = rms_norm(before_last, theirs["layers.5.attention_norm"], target.norm_eps)
    want = (normed @ theirs["layers.5.attention.value"]).reshape(values[0].shape)
    np.testing.assert_allclose(values[0], want, rtol=1e-5, atol=1e-6)
    other = dflash_config_for(
        target, block_size=4, mask_token_id=31, target_layer_ids=(1,), intermediate_size=8
    )
    with pytest.raises(ValueError, match="intermediate_size: expected the target's 24, got 8"):
        init_from_target(
            other, init_dflash_params(other, jax.random.key(0), jnp.float32), target, frozen.params
        )


def test_a_window_that_would_cut_blocks_in_decoding_alone_is_refused():
    target = tiny_target().target.config
    sizes = dict(mask_token_id=31, target_layer_ids=(1,), window=4)
    assert dflash_config_for(target, block_size=4, **sizes).decoder.window == 4
    with pytest.raises(ValueError, match="window: expected at least the block of 5, got 4"):
        dflash_config_for(target, block_size=5, **sizes)
