from pathlib import Path

import pytest
import tokenizers

from jspec.text.tokenizer import Tokenizer

GOLDEN = Path(__file__).parents[2] / "conformance" / "cases" / "train" / "data_loss_mask"


@pytest.fixture(scope="session")
def tiny() -> Tokenizer:
    """A byte-level tokenizer of 420 ids, without a chat template."""
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / "tokenizer.json"))
    return Tokenizer(backend=backend, chat_templates={}, special_tokens={}, bos_id=None, eos_ids=(2,))
