"""A sound drafter passes every step; each planted fault is named by its step and no other."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rule_models import (
    HELD_OUT,
    LAYER_IDS,
    World,
    contract_file,
    copied,
    failing,
    rule_texts,
    statuses,
    train_block_drafter,
    write_samples,
)
from safetensors.numpy import load_file, save_file

from jspec.checkpoints.dflash import load_dflash
from jspec.checkpoints.dflash_save import save_dflash
from jspec.cli import main
from jspec.drafters.dflash2_layers import Convolution, Selector
from jspec.drafters.dflash_init import upgrade_dflash_params
from jspec.objectives import draft_rows as objective_module
from jspec.objectives.block_pass import training_hidden
from jspec.objectives.blocks import block_targets
from jspec_train.check.code_steps import code_step, drafted_step
from jspec_train.check.program import Extent, drafts_of, random_texts, texts_of_data
from jspec_train.check.subject import open_subject
from jspec_train.check.weights_step import weights_step
from jspec_train.samples import SampleWriter, open_samples


@pytest.fixture(scope="module")
def sound(world):
    """A drafter's folder, as the trainer exports it."""
    folder = world.folder / "sound"
    config, params = train_block_drafter(world)
    save_dflash(folder, config, params, files=contract_file(world.frozen.target))
    return folder


def test_a_sound_drafter_passes_every_step(world, sound, tmp_path, capsys):
    capture = world.folder / "features"
    main_capture(world, capture)
    with pytest.raises(SystemExit) as left:
        main(
            [
                "check", *map(str, (world.model, sound, capture)), "--samples", str(HELD_OUT), "--tokens", "24",
                "--json", str(tmp_path / "figures.json"), "--compilation-cache", "",
            ]
        )  # fmt: skip
    said = capsys.readouterr().out.splitlines()
    assert left.value.code == 0, said
    assert len(said) == 11
    assert all(" pass " in line for line in said[:10])
    assert "nothing found" in said[10]
    figures = json.loads((tmp_path / "figures.json").read_text())["steps"]
    decoded, drafted = figures[9]["figures"], figures[8]["figures"]
    assert decoded["mean_commit_length"] == pytest.approx(decoded["expected_on_answers"], rel=0.02)
    assert drafted["drafted_accept_length"] > 2.5
    assert figures[6]["figures"]["difference"] < 1e-4


def main_capture(world: World, out: Path) -> None:
    with pytest.raises(SystemExit) as left:
        main(
            [
                "capture", str(world.samples), str(out), "--target", str(world.model),
                "--layers", ",".join(map(str, LAYER_IDS)), "--compilation-cache", "",
            ]
        )  # fmt: skip
    assert not left.value.code


def test_labels_shifted_in_training_are_named(world, tmp_path, monkeypatch):
    def one_later(batch, blocks, *, block_size, anchor_predicts):
        targets = block_targets(batch, blocks, block_size=block_size)
        further = block_targets(batch, blocks, block_size=block_size + 1)
        mask = targets.mask & further.mask[:, :, 1:]
        return dataclasses.replace(targets, labels=further.labels[:, :, 1:], mask=mask)

    monkeypatch.setattr(objective_module, "block_targets", one_later)
    config, params = train_block_drafter(world)
    monkeypatch.undo()
    save_dflash(tmp_path / "drafter", config, params)
    found, diagnosis = statuses(world, tmp_path / "drafter", world.samples)
    assert failing(found) == {4}, found
    assert "labels one token later" in found[4][1]
    assert "step 4 (alignment) hides it" in found[3][1]
    assert "step 4 (alignment)" in diagnosis


def test_a_leaked_anchor_feature_is_named(world, tmp_path, monkeypatch):
    def leaking(net, embed, batch, blocks, targets):
        """The context's bound one too far: `index <= anchor`."""
        ids = jnp.roll(batch.ids, 1, axis=1)
        anchors = jnp.where(blocks.keep, blocks.anchors + 1, 0)
        return training_hidden(
            net,
            embed,
            dataclasses.replace(batch, ids=ids),
            dataclasses.replace(blocks, anchors=anchors),
            targets,
        )

    monkeypatch.setattr(objective_module, "training_hidden", leaking)
    config, params = train_block_drafter(world)
    monkeypatch.undo()
    save_dflash(tmp_path / "drafter", config, params)
    found, diagnosis = statuses(world, tmp_path / "drafter", world.samples)
    assert failing(found) == {5}, found
    assert "anchor's feature visible" in found[5][1]
    assert "leak" in diagnosis


def test_another_rope_is_named(world, sound, tmp_path):
    rope = {"rope_theta": 1e6, "rope_type": "default"}
    drafter = copied(sound, tmp_path / "drafter", rope_theta=1e6, rope_parameters=rope)
    found, _ = statuses(world, drafter, world.samples)
    assert failing(found) == {6}, found
    assert "theta 10000" in found[6][1]


def test_swapped_layers_are_named(world, sound, tmp_path):
    swapped = {"target_layer_ids": list(LAYER_IDS[::-1])}
    drafter = copied(sound, tmp_path / "drafter", dflash_config=swapped)
    found, _ = statuses(world, drafter, world.samples)
    assert failing(found) == {3}, found
    assert f"layers {list(LAYER_IDS)}" in found[3][1]
    # The contract that the trainer wrote knows it without data.
    shutil.copy(sound / "feature_contract.json", drafter)
    found, _ = statuses(world, drafter, None)
    assert failing(found) == {2}
    assert "['layer.0', 'layer.2'] in feature_contract.json" in found[2][1]


def test_another_template_is_named(world, sound, tmp_path):
    ids = rule_texts(HELD_OUT, seed=8)
    data = write_samples(tmp_path / "data", world.model, ids, template="0" * 64)
    found, _ = statuses(world, sound, data)
    assert failing(found) == {1}
    assert "chat template 000000000000 in the data" in found[1][1]


def test_a_missing_tensor_is_named(world, sound, tmp_path, capsys):
    drafter = copied(sound, tmp_path / "drafter")
    tensors = load_file(drafter / "model.safetensors")
    del tensors["layers.0.mlp.up_proj.weight"]
    save_file(tensors, drafter / "model.safetensors")
    with pytest.raises(SystemExit) as left:
        main(["check", str(world.model), str(drafter), str(world.samples), "--compilation-cache", ""])
    assert left.value.code == 1
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if " fail " in line] == [said[7]]
    assert "layers.0.mlp.up_proj.weight" in said[7]
    assert all("did not load (step 8)" in said[i] for i in (1, 2, 3, 4, 5, 6, 8, 9))


def test_weights_that_say_nothing_are_named(world, sound, tmp_path):
    for name, value, line in (
        ("fc.weight", 0, "fc is all zero"),
        ("norm.weight", np.nan, "norm has 32 values"),
    ):
        drafter = copied(sound, tmp_path / name)
        tensors = load_file(drafter / "model.safetensors")
        tensors[name] = np.full_like(tensors[name], value)
        save_file(tensors, drafter / "model.safetensors")
        found, _ = statuses(world, drafter, None)
        assert 8 in failing(found)
        assert line in found[8][1]


def test_without_data_the_steps_on_data_say_so(world, sound):
    found, _ = statuses(world, sound, None, decode=True)
    assert {step for step, (status, _) in found.items() if status == "pass"} == {2, 7, 8}
    for step in (1, 3, 4, 5, 6, 9, 10):
        assert found[step] == ("not checkable", "no data given")


def test_a_drafter_of_another_target_is_one_line(world, sound, tmp_path):
    drafter = copied(sound, tmp_path / "drafter", num_target_layers=5)
    found, _ = statuses(world, drafter, world.samples)
    assert failing(found) == {2}
    assert "expected a target with layers 5, not 3" in found[2][1]
    assert found[3] == ("not checkable", "the drafter does not fit the target (step 2)")


def test_a_dflash2_drafter_shows_coverage_and_selector(world, sound, tmp_path):
    plain = load_dflash(sound, jnp.float32)
    held = plain.drafter.config
    config = dataclasses.replace(
        held, convolution=Convolution(taps=2, group_size=16), selector=Selector(rank=4, top_k=4)
    )
    params = upgrade_dflash_params(held, plain.params, config, jax.random.key(0), jnp.float32)
    save_dflash(tmp_path / "drafter", config, params)
    subject = open_subject(str(world.model), str(tmp_path / "drafter"), world.samples, "float32")
    assert "still zero as at the start" in weights_step(subject).said
    texts = texts_of_data(subject, Extent(samples=2, tokens=24))
    drafts = drafts_of(subject, texts)
    found = drafted_step(subject.method, params, subject.tables(), texts, drafts)
    assert found.status == "pass"
    assert min(found.figures["coverage"]) > 0.95
    assert "coverage" in found.said and "selector accuracy" in found.said
    # The same drafts in other places: the metric of training no longer says what is accepted.
    moved = dataclasses.replace(drafts, tokens=np.roll(drafts.tokens, 1, axis=1))
    assert drafted_step(subject.method, params, subject.tables(), texts, moved).status == "fail"


def test_hidden_states_that_differ_are_named_by_row(world, sound):
    subject = open_subject(str(world.model), str(sound), None, "float32")
    texts = random_texts(subject, Extent(samples=2, tokens=24))
    drafts = drafts_of(subject, texts)
    arguments = subject.method, subject.drafter_params, subject.tables(), texts
    assert code_step(*arguments, drafts).status == "pass"
    hidden = drafts.compared.copy()
    hidden[0, 1, 2] += 0.01
    found = code_step(*arguments, dataclasses.replace(drafts, compared=hidden))
    assert found.status == "fail" and "row 2 of the block" in found.said


def test_stored_features_of_the_token_beside_are_named(world, sound, tmp_path):
    features = tmp_path / "features"
    main_capture(world, features)
    source = open_samples(features)
    with SampleWriter(tmp_path / "beside", source.header) as writer:
        for index in range(len(source)):
            sample = source[index]
            writer.write(dataclasses.replace(sample, features=np.roll(sample.features, 1, axis=0)))
        writer.finish()
    found, _ = statuses(world, sound, tmp_path / "beside")
    assert failing(found) == {2}
    assert "they are those of one token earlier" in found[2][1]
