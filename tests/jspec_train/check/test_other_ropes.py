"""The change of rope reaches every layer, whichever way it is said to turn."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
from training_data import HIDDEN, documents, random_params, target_config, tiny_drafter, tiny_target

from jspec.checkpoints.dflash import drafter_of
from jspec.drafters.eagle import eagle
from jspec.drafters.eagle_init import eagle_config_for
from jspec.drafters.eagle_net import eagle_leaves
from jspec.objectives.blocks import Blocks
from jspec.targets.rope import Llama3, Rope
from jspec_train.check.block_method import BlockMethod
from jspec_train.check.eagle_method import EagleMethod
from jspec_train.check.method import Input
from jspec_train.check.perturbation import other_ropes
from jspec_train.check.perturbed import Pass
from jspec_train.recipe_parts import DrafterPart

STATED, OTHER = Rope(theta=1e4), Rope(theta=3.0)


def windowed_dflash():
    part = DrafterPart(num_layers=2, block_size=4, intermediate_size=24, target_layer_ids=(1, 4), window=6)
    config, params = tiny_drafter(part)
    return config, params, lambda config: BlockMethod(drafter=drafter_of(config))


def windowed_eagle():
    config = eagle_config_for(
        target_config(), kind="eagle3", target_layer_ids=(1, 4), num_layers=2, own_head=True, window=6
    )
    params = random_params(eagle_leaves(config, jnp.dtype(jnp.float32)), 3)
    return config, params, lambda config: EagleMethod(drafter=eagle(config, draft_length=3))


@pytest.mark.parametrize("drafter", [windowed_dflash, windowed_eagle])
def test_another_rope_is_that_of_window_layers_as_well(drafter):
    config, params, method = drafter()
    batch = documents(2, 24, 2 * HIDDEN)
    anchors = jnp.array([[5, 8], [6, 9]])
    blocks = Blocks(anchors=anchors, keep=jnp.ones(anchors.shape, jnp.bool_))

    def loss(decoder, given=None):
        drafted = method(dataclasses.replace(config, decoder=decoder))
        whole = Pass(method=drafted, params=params, tables=tiny_target())
        return whole.rows(batch, blocks, given).loss

    decoder = config.decoder
    assert decoder.windows == {"window": 6}
    changed = loss(decoder, Input(rope=OTHER))
    assert np.abs(changed - loss(decoder)).max() > 1e-3
    stated = dataclasses.replace(decoder, full_rope=OTHER, window_rope=OTHER)
    np.testing.assert_array_equal(changed, loss(stated))


def test_ropes_are_tried_unless_every_layer_has_them():
    decoder = dataclasses.replace(target_config(), window=4, window_rope=STATED)
    scaling = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=16)
    own = dataclasses.replace(OTHER, scaling=scaling)
    full = dataclasses.replace(decoder, full_rope=own)
    assert STATED in other_ropes(full, STATED) and own not in other_ropes(full, STATED)
    assert OTHER in other_ropes(full, STATED)  # without its scaling
    kinds = ("window", *decoder.layer_kinds[1:])
    mixed = dataclasses.replace(full, layer_kinds=kinds)
    assert {STATED, own} <= set(other_ropes(mixed, own))
    windows = dataclasses.replace(full, layer_kinds=("window",) * decoder.num_layers)
    assert own in other_ropes(windows, own) and STATED not in other_ropes(windows, own)
