"""A tiny target with a tokenizer, and data for it."""

import shutil
from pathlib import Path

import pytest
import tokenizers
from training_runs import write_data

TARGET = Path(__file__).parents[1] / "data" / "targets" / "llama_plain"


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """A target's folder with a tokenizer of one word per id."""
    folder = tmp_path_factory.mktemp("target")
    shutil.copytree(TARGET, folder, dirs_exist_ok=True)
    words = {f"w{index}": index for index in range(61)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def data(target, tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    write_data(folder / "train", target, 24, 0)
    write_data(folder / "validation", target, 4, 1)
    return folder
