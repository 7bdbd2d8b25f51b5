"""Messages of a chat: what may be sent, and what the chat template gets."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import model_validator

from jspec_serve.api.fields import Strict

# Which role may carry which fields besides its content.
ROLE_FIELDS = {
    "system": {"name"},
    "developer": {"name"},
    "user": {"name"},
    "assistant": {"name", "tool_calls", "reasoning_content", "refusal"},
    "tool": {"tool_call_id", "name"},
}


class TextPart(Strict):
    """A part of a message's content; models here read nothing but text."""

    type: Literal["text"]
    text: str


class FunctionCall(Strict):
    """What the assistant called."""

    name: str
    arguments: str


class ToolCall(Strict):
    """A call in a message of the assistant."""

    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Strict):
    """One message of a chat."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: None = None
    reasoning_content: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _fits_its_role(self) -> "Message":
        allowed = ROLE_FIELDS[self.role] | {"role", "content"}
        for name in self.model_fields_set - allowed:
            if getattr(self, name) is not None:
                raise ValueError(f"expected no {name} in a message of {self.role}; remove it")
        if self.content is None and not self.tool_calls:
            raise ValueError("expected content; write what is said")
        if self.role == "tool" and self.tool_call_id is None:
            raise ValueError("expected tool_call_id in a message of tool; name the call that it answers")
        return self


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as chat templates read them.

    A developer is what newer models call the system; templates know only that name. Arguments of calls are
    JSON in OpenAI's API and objects in templates.
    """
    return [_template_message(message) for message in messages]


def _template_message(message: Message) -> dict[str, Any]:
    value: dict[str, Any] = {"role": "system" if message.role == "developer" else message.role}
    content = message.content
    value["content"] = "".join(part.text for part in content) if isinstance(content, list) else content
    for name in ("name", "reasoning_content", "tool_call_id"):
        if getattr(message, name) is not None:
            value[name] = getattr(message, name)
    if message.tool_calls:
        value["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)},
            }
            for call in message.tool_calls
        ]
        value["content"] = value["content"] or ""
    return value


def _arguments(text: str) -> Any:
    """The object, or the text as it is if a model wrote no object then."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text
