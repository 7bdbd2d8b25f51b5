"""Built-in prompts by task: free text, and text that largely repeats its prompt."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.text.file import read_text

Chat = list[dict[str, Any]]

_STORY = (
    "The lighthouse keeper woke before dawn, as he had every day for thirty years. He climbed the ninety-two "
    "steps to the lamp room, wiped the salt from the windows, and wrote the wind and the height of the waves "
    "into the logbook. At noon a small red boat came round the headland. It carried the mail, two sacks of "
    "flour, and a young woman with a leather case. She said that she had come to measure the tides."
)
_LETTER = (
    "Dear Ms Okafor, thank you for your order of twelve blue folders and four boxes of envelopes. We sent the parcel "
    "on Tuesday with the morning post, and it should reach you by Friday. If anything is missing, please write to us "
    "or call the shop between nine and five. We hope to hear from you soon. Kind regards, Paul Lindqvist"
)
_RECIPE = (
    "Peel the potatoes and cut them into thin slices. Heat the oil in a heavy pan and fry the onions until they are "
    "golden. Add the potatoes, salt and pepper, and cook them slowly for twenty minutes. Beat the eggs in a bowl, pour "
    "them over the potatoes, and turn the omelette when the edges are firm. Serve it warm with bread and a green salad."
)
_CODE = """class Counter:
    def __init__(self, start):
        self.value = start
        self.history = []

    def add(self, amount):
        self.history.append(self.value)
        self.value = self.value + amount
        return self.value

    def undo(self)
        if self.history:
            self.value = self.history.pop()
        return self.value"""

PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "Explain in a few sentences why the sky is blue.",
        "How do bees make honey?",
        "Why do people keep diaries?",
        "Tell me about the history of the bicycle.",
    ),
    "math": (
        "A baker sells 14 loaves in the morning and twice as many in the afternoon. A loaf costs 3 euros. How much money "
        "does he take in that day? Think step by step.",
        "A train leaves at 9:40 and arrives at 13:05. It stops twice for 10 minutes. How long does it move? Show your work.",
        "Solve for x and explain every step: 3x + 7 = 2x - 5 + 18.",
    ),
    "rewrite": (
        f"Please proofread the following text. Reply with the corrected text only.\n\n{_STORY}",
        f"Rewrite this text and correct any spelling mistakes:\n\n{_RECIPE.replace('onions', 'onoins')}",
        f"Repeat after me: {_LETTER}",
    ),
    "code": (
        f"Correct the syntax error in this code. Reply with the whole corrected code only.\n\n```python\n{_CODE}\n```",
        f"Format this code:\n\n```python\n{_CODE.replace('undo(self)', 'undo(self):')}\n```",
    ),
}


def asked(text: str) -> Chat:
    """One user message."""
    return [{"role": "user", "content": text}]


def chats_by_task(path: str | Path | None = None) -> dict[str, tuple[Chat, ...]]:
    """The built-in prompts, or those of a JSON Lines file, as chats.

    Args:
      path: of objects with "prompt" (a text) or "messages" (objects with "role" and "content"), and
        optionally "task"; None = built-in ones.

    Raises:
      ValueError: no such file, a line that is no such object, or no line at all.
    """
    if path is None:
        return {task: tuple(map(asked, texts)) for task, texts in PROMPTS.items()}
    tasks: dict[str, list[Chat]] = {}
    text = read_text("prompts", path, expected="JSON Lines")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            row = None
        chat = _chat_of(row) if isinstance(row, dict) else None
        if chat is None:
            raise ValueError(
                f'{path}:{number}: expected an object with a text as "prompt" or a chat as "messages", got '
                f"{line[:60]!r}; write one object per line"
            )
        assert isinstance(row, dict)
        tasks.setdefault(str(row.get("task", "prompts")), []).append(chat)
    if not tasks:
        raise ValueError(f"{path}: expected at least one prompt, got none; write one object per line")
    return {task: tuple(chats) for task, chats in tasks.items()}


def _chat_of(row: Mapping[str, Any]) -> Chat | None:
    match row:
        case {"prompt": str(text)} if text and "messages" not in row:
            return asked(text)
        case {"messages": list(messages)} if messages and "prompt" not in row:
            fine = all(isinstance(m, dict) and isinstance(m.get("role"), str) for m in messages)
            return messages if fine else None
    return None
