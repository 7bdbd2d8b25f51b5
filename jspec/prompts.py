"""What may be passed as a prompt, and the token ids it stands for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or several were passed."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping | bytes) or not isinstance(prompts, Iterable):
        raise ValueError(
            f"prompts: expected text, ids, chat messages or a list of prompts, got {type(prompts).__name__}; "
            "wrap a single message in a list"
        )
    items = list(prompts)
    if items and all(isinstance(item, (int, np.integer, Mapping)) for item in items):
        return [[item if isinstance(item, Mapping) else int(item) for item in items]]  # type: ignore[list-item]
    return items  # type: ignore[return-value]


def prompt_ids(index: int, prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of one prompt: ids as they are, text encoded, messages through the chat template."""
    if not isinstance(prompt, str | Sequence | np.ndarray) or isinstance(prompt, bytes):
        raise ValueError(
            f"prompts[{index}]: expected text, ids or chat messages, got {type(prompt).__name__}; "
            "pass one of these, or a list of them"
        )
    if not isinstance(prompt, str) and all(isinstance(item, (int, np.integer)) for item in prompt):
        return [int(item) for item in prompt]  # type: ignore[arg-type]
    if tokenizer is None:
        raise ValueError(f"prompts[{index}]: expected token ids, because this engine has no tokenizer")
    if isinstance(prompt, str):
        return tokenizer.encode(prompt)
    return tokenizer.chat(prompt)  # type: ignore[arg-type]
