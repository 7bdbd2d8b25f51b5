"""What may be passed as a prompt, and the token ids it stands for."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jspec.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | np.ndarray | Sequence[Mapping[str, Any]]

_KINDS = "text, token ids or chat messages"


def as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """A list of prompts, whether one or several were passed."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping):
        raise ValueError(
            f"prompts: expected {_KINDS}, or a list of these, got the mapping {_shown(prompts)}; "
            "put a single message into a list"
        )
    if isinstance(prompts, bytes) or not isinstance(prompts, Iterable) or _is_scalar(prompts):
        raise ValueError(
            f"prompts: expected {_KINDS}, or a list of these, got {_shown(prompts)}; pass one of them"
        )
    items: list[Any] = list(prompts)
    if items and all(map(_is_id, items)):
        return [[int(item) for item in items]]
    if items and all(isinstance(item, Mapping) for item in items):
        return [items]
    return items


def checked(index: int, prompt: Any) -> Prompt:
    """A prompt of a kind that there is; messages get their text in one piece.

    Args:
      index: of the prompt among those that were passed, for messages.
      prompt: whatever was passed.

    Returns:
      Text as it is, ids as ints, messages as dicts whose content is one text.

    Raises:
      ValueError: it is none of these, or mixes them, or a message lacks what a chat needs.
    """
    name = f"prompts[{index}]"
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence | np.ndarray) or isinstance(prompt, bytes) or _is_scalar(prompt):
        remedy = "put a message into a list" if isinstance(prompt, Mapping) else "pass one of these"
        raise ValueError(f"{name}: expected {_KINDS}, got {_shown(prompt)}; {remedy}")
    if any(isinstance(item, Mapping) for item in prompt):
        return [_message(f"{name}[{number}]", item) for number, item in enumerate(prompt)]
    for number, item in enumerate(prompt):
        if not _is_id(item):
            raise ValueError(
                f"{name}[{number}]: expected a token id or a chat message, got {_shown(item)}; "
                "pass several texts as prompts of their own"
            )
    return [int(item) for item in prompt]


def prompt_ids(index: int, prompt: Prompt, tokenizer: Tokenizer | None) -> list[int]:
    """Token ids of one prompt: ids as they are, text encoded, messages through the chat template.

    Raises:
      ValueError: see `checked`; text without a tokenizer; text or messages that the tokenizer refuses.
    """
    value: Any = checked(index, prompt)
    is_text = isinstance(value, str)
    if not is_text and not any(isinstance(item, Mapping) for item in value):
        return value
    if tokenizer is None:
        raise ValueError(
            f"prompts[{index}]: expected token ids, because this engine has no tokenizer, got "
            f"{'text' if is_text else 'chat messages'}; encode the prompt, or pass tokenizer="
        )
    try:
        return tokenizer.encode(value) if is_text else tokenizer.chat(value)
    except ValueError as problem:
        raise ValueError(f"prompts[{index}]: {problem}") from problem


def _message(name: str, message: Any) -> dict[str, Any]:
    """One chat message, its content joined if it comes in parts, as the OpenAI API writes it."""
    if not isinstance(message, Mapping):
        raise ValueError(
            f'{name}: expected a message {{"role": ..., "content": ...}}, got {_shown(message)}; '
            "pass ids and messages as prompts of their own"
        )
    role = message.get("role")
    if not isinstance(role, str):
        got = _shown(role) if "role" in message else "none"
        raise ValueError(f'{name}["role"]: expected a string, got {got}; name who speaks, such as "user"')
    content = message.get("content")
    if content is None and message.get("tool_calls"):
        return dict(message)  # an assistant that calls a tool may say nothing
    if isinstance(content, str):
        return dict(message)
    if not isinstance(content, list | tuple):
        got = _shown(content) if "content" in message else "none"
        raise ValueError(f'{name}["content"]: expected a string, got {got}; write what is said')
    for number, part in enumerate(content):
        is_text = (
            isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str)
        )
        if not is_text:
            raise ValueError(
                f'{name}["content"][{number}]: expected a part {{"type": "text", "text": ...}}, got '
                f"{_shown(part)}; models here read nothing but text"
            )
    return {**message, "content": "".join(part["text"] for part in content)}


def _is_id(item: Any) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool)


def _is_scalar(value: Any) -> bool:
    return isinstance(value, np.ndarray) and value.ndim == 0


def _shown(value: Any) -> str:
    """A value as an error quotes it: on one line, and not the whole of a long one."""
    text = repr(value)
    return " ".join((text if len(text) <= 80 else f"{text[:77]}...").split())
