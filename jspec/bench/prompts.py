"""Built-in prompts by task: free text, and text that largely repeats its prompt."""

import json
from pathlib import Path

_STORY = (
    "The lighthouse keeper woke before dawn, as he had every day for thirty years. He climbed the ninety-two "
    "steps to the lamp room, wiped the salt from the windows, and wrote the wind and the height of the waves "
    "into the logbook. At noon a small red boat came round the headland. It carried the mail, two sacks of "
    "flour, and a young woman with a leather case. She said that she had come to measure the tides."
)
_CODE = """def total_price(items, tax_rate):
    total = 0
    for item in items:
        total = total + item["price"] * item["quantity"]
    if total > 100:
        total = total * 0.9
    tax = total * tax_rate
    return total + tax


def print_receipt(items, tax_rate):
    for item in items:
        print(item["name"], item["quantity"], item["price"])
    print("Total:", total_price(items, tax_rate)"""
_RECORDS = """name: Ada, city: London, born: 1815
name: Grace, city: New York, born: 1906
name: Katherine, city: Hampton, born: 1918
name: Radia, city: Portsmouth, born: 1951"""

PROMPTS: dict[str, tuple[str, ...]] = {
    "chat": (
        "Explain in a few sentences why the sky is blue.",
        "Give me three tips for learning to cook.",
        "What is the difference between a planet and a star?",
        "Write a short letter to a friend about a rainy holiday.",
    ),
    "copy": (
        f"Repeat the following text exactly, word for word:\n\n{_STORY}",
        f"Copy these records unchanged, then stop:\n\n{_RECORDS}",
        f"Rewrite this text and correct any spelling mistakes:\n\n{_STORY.replace('measure', 'mesure')}",
    ),
    "code": (
        f"Fix the missing bracket in this code and show the whole program again:\n\n```python\n{_CODE}\n```",
        f"Add a docstring to each function and print the complete code again:\n\n```python\n{_CODE})\n```",
    ),
}


def read_prompts(path: str | Path) -> dict[str, tuple[str, ...]]:
    """Prompts of a JSON Lines file: objects with "prompt" and optionally "task".

    Raises:
      ValueError: a line that is no such object, or no line at all.
    """
    tasks: dict[str, list[str]] = {}
    for number, line in enumerate(Path(path).read_text().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            tasks.setdefault(str(row.get("task", "prompts")), []).append(str(row["prompt"]))
        except (json.JSONDecodeError, AttributeError, KeyError) as problem:
            raise ValueError(
                f'{path}:{number}: expected an object with "prompt", got {line[:60]!r}; write one object per line'
            ) from problem
    if not tasks:
        raise ValueError(f"{path}: expected at least one prompt, got none; write one object per line")
    return {task: tuple(prompts) for task, prompts in tasks.items()}
