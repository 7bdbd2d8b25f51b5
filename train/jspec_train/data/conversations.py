"""Conversations of data sets in one form: roles, keys, and which order of roles is one."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS = ("conversations", "messages")
ROLES = {
    "system": "system",
    "developer": "developer",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
    # One message a channel, for templates of the harmony kind.
    "assistant_analysis": "assistant_analysis",
    "assistant_commentary": "assistant_commentary",
    "assistant_final": "assistant_final",
    "assistant_reasoning_effort": "assistant_reasoning_effort",
}
_LEADING = ("system", "developer", "assistant_reasoning_effort")
_KEPT = ("reasoning_content", "thinking", "reasoning", "name", "tool_call_id")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Conversation:
    """Messages in the form that chat templates read."""

    messages: tuple[Mapping[str, Any], ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    cut: bool = False  # messages were dropped because their roles were out of order


def is_answer(message: Mapping[str, Any]) -> bool:
    """Whether the target wrote the message."""
    role = message["role"]
    return role.startswith("assistant") and role != "assistant_reasoning_effort"


def read_conversation(where: str, values: Mapping[str, Any], column: str) -> Conversation:
    """The conversation in a row, as it stands there.

    Args:
      where: file and line, for messages.
      values: the row.
      column: which one holds the messages; "tools" is read beside it.

    Raises:
      ValueError: no list of messages, an unknown role, or content that is no text.
    """
    listed = values[column]
    if not isinstance(listed, Sequence) or isinstance(listed, str):
        raise ValueError(f"{where}: expected a list of messages in {column!r}, got {_shown(listed)}")
    return Conversation(
        messages=tuple(_message(f"{where}: message {number}", item) for number, item in enumerate(listed)),
        tools=_tools(where, values.get("tools")),
    )


def clean(conversation: Conversation, *, system: str | None = None) -> Conversation:
    """The part of a conversation whose roles are in order.

    A leading system message stays; other messages before the first user message go; from the first
    message on that is out of order, all goes. An answer follows a user, a tool or another channel of the
    same answer; a tool follows an answer or a tool.

    Args:
      conversation: as read.
      system: text of a system message for conversations that begin with none.

    Returns:
      The rest; without messages if there is no user message.
    """
    given = conversation.messages
    leading: list[Mapping[str, Any]] = []
    for message in given:
        if message["role"] not in _LEADING or message["role"] in [one["role"] for one in leading]:
            break
        leading.append(message)
    begin = len(leading)
    if not leading and system is not None:
        leading = [{"role": "system", "content": system}]
    first = next((i for i in range(begin, len(given)) if given[i]["role"] == "user"), len(given))
    kept = list(given[first : first + 1])
    for message in given[first + 1 :]:
        if not _may_follow(kept[-1], message):
            break
        kept.append(message)
    cut = first + len(kept) < len(given) or first > begin
    return dataclasses.replace(conversation, messages=tuple(leading + kept) if kept else (), cut=cut)


def _may_follow(before: Mapping[str, Any], message: Mapping[str, Any]) -> bool:
    if message["role"] == "tool":
        return is_answer(before) or before["role"] == "tool"
    if not is_answer(message):
        return True
    if before["role"] in ("user", "tool"):
        return True
    return is_answer(before) and "assistant" not in (before["role"], message["role"])


def _message(where: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise ValueError(f'{where}: expected {{"role": ..., "content": ...}}, got {_shown(item)}')
    name = item.get("role", item.get("from"))
    if name not in ROLES:
        raise ValueError(
            f"{where}: expected a role of {', '.join(ROLES)}, got {name!r}; rename it or drop the message"
        )
    message: dict[str, Any] = {
        "role": ROLES[name],
        "content": _text(where, item.get("content", item.get("value"))),
    }
    calls = item.get("tool_calls")
    if calls:
        message["tool_calls"] = [_tool_call(where, call) for call in _json_list(where, "tool_calls", calls)]
    return message | {key: item[key] for key in _KEPT if item.get(key) is not None}


def _text(where: str, content: Any) -> str:
    if content is None:
        return ""  # an answer of tool calls alone
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence) and all(
        isinstance(part, Mapping) and "text" in part for part in content
    ):
        return "".join(part["text"] for part in content)
    raise ValueError(f"{where}: expected text as content, got {_shown(content)}; drop what is no text")


def _tool_call(where: str, call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ValueError(
            f'{where}: expected tool calls with "function": {{"name", "arguments"}}, got {_shown(call)}'
        )
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except json.JSONDecodeError as problem:
            raise ValueError(
                f"{where}: expected JSON arguments of {function['name']}, got {_shown(arguments)}"
            ) from problem
    named = {"id": call["id"]} if call.get("id") is not None else {}
    return named | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(where: str, tools: Any) -> tuple[Mapping[str, Any], ...]:
    listed = [] if tools in (None, "") else _json_list(where, "tools", tools)
    if not all(isinstance(tool, Mapping) for tool in listed):
        raise ValueError(f"{where}: expected tools as JSON objects, got {_shown(listed)}")
    return tuple(listed)


def _json_list(where: str, name: str, value: Any) -> list[Any]:
    """A list, or the JSON of one."""
    parsed = value
    if isinstance(value, str):
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError as problem:
            raise ValueError(
                f"{where}: expected {name} as a list or its JSON, got {_shown(value)}"
            ) from problem
    if not isinstance(parsed, list):
        raise ValueError(f"{where}: expected {name} as a list or its JSON, got {_shown(value)}")
    return parsed


def _shown(value: Any) -> str:
    return repr(value)[:60]
