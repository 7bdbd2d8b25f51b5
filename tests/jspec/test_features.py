"""Feature names and the contract beside the arrays."""

import dataclasses
from pathlib import Path

import pytest

from jspec.checkpoints.target import load_target
from jspec.features import check_names, feature_contract, layer_outputs

FOLDER = Path(__file__).parents[1] / "data" / "targets"


def target(case: str):
    return load_target(FOLDER / case, dtype="float32").target


def test_checkpoint_ids_become_names():
    assert layer_outputs([-1, 0, 7]) == ("embedding", "layer.0", "layer.7")


def test_names_of_a_model_are_accepted():
    check_names(("embedding", "layer.0", "layer.23", "final_norm"), 24)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layer.40", r"features: layer 40 does not exist; the model has 24 layers, 0 to 23"),
        ("layer.24", "features: layer 24 does not exist"),
        ("layer.-1", "features: expected 'embedding', .* got 'layer.-1'"),
        ("layer.01", "features: expected"),
        ("layer", "features: expected"),
        ("logits", "features: expected"),
    ],
)
def test_other_names_are_refused(name, message):
    with pytest.raises(ValueError, match=message):
        check_names(("embedding", name), 24)


def test_contract_accepts_its_own_target_only():
    contract = feature_contract(target("llama_plain"), ("layer.0", "layer.2"), "float32")

    assert contract.width == 48
    contract.check(target("llama_plain"))
    with pytest.raises(ValueError, match=r"features: expected the target \(llama, .*\), got \(qwen3, "):
        contract.check(target("qwen3_window"))
    with pytest.raises(ValueError, match="features: expected width 48 for 2 states of 24, got 24"):
        dataclasses.replace(contract, width=24).check(target("llama_plain"))


def test_contracts_that_differ_name_the_difference():
    contract = feature_contract(target("llama_plain"), ("layer.0", "layer.2"), "float32")

    contract.check_same(dataclasses.replace(contract))
    with pytest.raises(ValueError, match=r"features: expected names \('layer.0', 'layer.2'\), got"):
        contract.check_same(dataclasses.replace(contract, names=("layer.2", "layer.0")))
    with pytest.raises(ValueError, match="features: expected dtype float32, got bfloat16"):
        contract.check_same(dataclasses.replace(contract, dtype="bfloat16"))
