"""The steps for EAGLE and EAGLE-3: sound drafters pass, each planted fault is named by its step."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_models import (
    LAYER_IDS,
    contract_file,
    copied,
    failing,
    statuses,
    train_eagle,
    train_eagle3,
)

from jspec.checkpoints.eagle_save import save_eagle
from jspec.drafters.eagle_init import eagle_config_for, init_eagle_params
from jspec.objectives import eagle3 as objective_module
from jspec.objectives.rollouts import rollout_rows
from jspec_train.check.code_steps import code_step
from jspec_train.check.program import Extent, drafts_of, random_texts
from jspec_train.check.subject import open_subject


@pytest.fixture(scope="module")
def sound(world):
    """A drafter's folder, as the trainer exports it."""
    folder = world.folder / "eagle3"
    config, params = train_eagle3(world)
    save_eagle(folder, config, params, files=contract_file(world.frozen.target))
    return folder


def test_a_sound_drafter_passes_every_step(world, sound):
    found, diagnosis = statuses(world, sound, world.samples, decode=True)
    assert all(status == "pass" for status, _ in found.values()), found
    assert "nothing found" in diagnosis
    assert "eagle" not in found[2][1] and "the contract says so" in found[2][1]


def test_a_sound_eagle_passes_every_step(world):
    folder = world.folder / "eagle"
    config, params = train_eagle(world)
    save_eagle(folder, config, params, files=contract_file(world.frozen.target, ("final_norm",)))
    found, _ = statuses(world, folder, world.samples)
    assert not failing(found), found
    assert {step for step, (status, _) in found.items() if status == "pass"} >= {1, 2, 4, 5, 7, 8, 9}, found


def test_labels_shifted_in_training_are_named(world, tmp_path, monkeypatch):
    def one_later(batch, places, depth):
        row = rollout_rows(batch, places, depth)
        further = rollout_rows(batch, places, depth + 1)
        return dataclasses.replace(row, teachers=further.teachers, supervised=further.supervised)

    monkeypatch.setattr(objective_module, "rollout_rows", one_later)
    config, params = train_eagle3(world)
    monkeypatch.undo()
    save_eagle(tmp_path / "drafter", config, params)
    found, diagnosis = statuses(world, tmp_path / "drafter", world.samples)
    assert failing(found) == {4}, found
    assert "one token later" in found[4][1]
    assert "step 4 (alignment)" in diagnosis


def test_another_rope_is_named(world, sound, tmp_path):
    rope = {"rope_theta": 10.0, "rope_type": "default"}
    drafter = copied(sound, tmp_path / "drafter", rope_theta=10.0, rope_parameters=rope)
    found, _ = statuses(world, drafter, world.samples)
    assert failing(found) == {6}, found
    assert "theta 10000" in found[6][1]


def test_swapped_layers_are_named(world, sound, tmp_path):
    swapped = {"eagle_aux_hidden_state_layer_ids": list(LAYER_IDS[::-1])}
    drafter = copied(sound, tmp_path / "drafter", eagle_config=swapped)
    found, _ = statuses(world, drafter, world.samples)
    assert failing(found) == {3}, found
    assert f"layers {list(LAYER_IDS)}" in found[3][1]
    # The contract that the trainer wrote knows it without data.
    shutil.copy(sound / "feature_contract.json", drafter)
    found, _ = statuses(world, drafter, None)
    assert failing(found) == {2}
    assert "set eagle_aux_hidden_state_layer_ids to the layers" in found[2][1]


@pytest.mark.parametrize("options", [dict(mask_token_id=31, num_layers=2, window=3), dict(window=3)])
def test_training_and_decoding_code_agree_whatever_the_drafter(world, tmp_path, options):
    config = eagle_config_for(
        world.frozen.target.config, kind="eagle3", target_layer_ids=LAYER_IDS, own_head=True, **options
    )
    params = init_eagle_params(config, jax.random.key(3), jnp.float32, initializer_range=0.4)
    save_eagle(tmp_path / "drafter", config, params)
    subject = open_subject(str(world.model), str(tmp_path / "drafter"), None, "float32")
    texts = random_texts(subject, Extent(samples=2, tokens=24))
    drafts = drafts_of(subject, texts)
    arguments = subject.method, subject.drafter_params, subject.tables(), texts
    assert code_step(*arguments, drafts).status == "pass"
    compared = drafts.compared.copy()
    compared[0, 1, 2] += 0.01
    found = code_step(*arguments, dataclasses.replace(drafts, compared=compared))
    assert found.status == "fail" and "draft token 3 most" in found.said
    assert np.abs(np.diff(drafts.compared[:, :, 0, 0])).max() > 1e-3
