"""A server whose model calls a function: one word of its table is a whole call."""

import contextlib
import json
from collections.abc import Iterator

import tokenizers
from contract.engines import TABLE
from contract.engines import engine as table_engine
from served import Served, serving

from jspec.text.tokenizer import Tokenizer

WEATHER = {"name": "weather", "arguments": {"city": "Köln"}}
CALL_ID = int(TABLE[7].argmax())  # what follows "weather"


def block(value) -> str:
    return f"<tool_call>\n{json.dumps(value, ensure_ascii=False)}\n</tool_call>"


TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }} {% endfor %}{# <tool_call> #}"
)
TOOL = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}


def tool_tokenizer(template: str = TEMPLATE) -> Tokenizer:
    """Eight words, one of them a call."""
    words = ["zero", "one", "two", "three", "four", "five", "six", "weather"]
    words[CALL_ID] = block(WEATHER).replace("\n", "").replace(" ", "")
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: id_ for id_, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(
        backend=backend, chat_templates={"default": template}, special_tokens={}, bos_id=None, eos_ids=()
    )


@contextlib.contextmanager
def serving_calls() -> Iterator[Served]:
    engine = table_engine("cut1", tokenizer=tool_tokenizer(), max_slots=2)
    with serving(engine) as one:
        yield one
