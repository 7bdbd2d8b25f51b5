"""What a user may hand to `jspec generate` with an EAGLE-3 drafter that cannot be: one line with the numbers."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from eagle_files import DRAFTED, IDS, TARGET_HIDDEN, config, tensors, write

from jspec.cli import main

TARGET = Path(__file__).parents[2] / "data" / "targets" / "llama_plain"
DIFFERENCES = IDS - np.arange(DRAFTED)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(TARGET, folder, dirs_exist_ok=True)
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"w0": 0, "w1": 1}, unk_token="w0"))
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.mark.parametrize(
    ("changes", "arrays", "options", "message"),
    [
        (
            {},
            {},
            ["--tree", "3x2x13"],
            "draft_length: expected at most 12 (width 3, depth 2, beam 3), got 13",
        ),
        ({}, {}, ["--tree", "11x1x11"], "tree: expected at most 10 candidates of a node"),
        ({}, {}, ["--tree", "3x2"], "tree: expected \"WIDTHxDEPTHxTOKENS\", got '3x2'"),
        ({}, {"d2t": None}, [], "expected tensor 'd2t' for 10 of 24 ids, got none"),
        (
            {},
            {"d2t": np.where(np.arange(DRAFTED) == 4, 1, DIFFERENCES)},
            [],
            "expected each target id once from 'd2t', got 5 for draft id 3 and 5 for 4",
        ),
        (
            {},
            {"d2t": np.where(np.arange(DRAFTED) == 9, 15, DIFFERENCES)},
            [],
            "expected target ids 0 to 23 from 'd2t', got 24 (draft id 9 + 15)",
        ),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}},
            {},
            [],
            "fc.weight: expected 2 captured states of target_hidden_size 6, so 2 x 6 = 12 columns, got shape [8, 18]",
        ),
        (
            {},
            {"fc.weight": np.zeros((8, 4 * TARGET_HIDDEN), np.float32)},
            [],
            "fc.weight: expected 3 captured states of target_hidden_size 6, so 3 x 6 = 18 columns, got shape [8, 24]",
        ),
        ({}, {}, [], "drafter: expected a target with "),  # it is sound, and another target's
    ],
    ids=["tree", "width", "text", "no d2t", "repeated", "out of range", "states", "fc", "target"],
)
def test_bad_input_is_one_line_with_the_numbers(
    target, tmp_path, capsys, unchecked, changes, arrays, options, message
):
    held = {name: array for name, array in (tensors() | arrays).items() if array is not None}
    drafter = write(tmp_path / "drafter", config(**changes), held)
    with pytest.raises(SystemExit) as left:
        main(
            [
                "generate",
                "w1",
                "-m",
                str(target),
                "--drafter",
                str(drafter),
                "--compilation-cache",
                "",
                *options,
            ]
        )
    assert left.value.code
    said = " ".join(capsys.readouterr().err.split())
    assert message in said
    assert "Traceback" not in said
