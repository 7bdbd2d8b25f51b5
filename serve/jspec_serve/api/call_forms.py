"""The form of an answer that has to call functions, or whose calls have to keep to a schema."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec_serve.api.tools import BEGIN, END, NamedTool, Tool, ToolChoice

# Names that the engine has for what is made here.
FIELDS: Mapping[str, str] = {name: "tools" for name in ("grammar", "grammar.lark", "grammar.structural_tags")}


def call_form(
    tools: Sequence[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> dict[str, Any]:
    """The fields of `jspec.Grammar` that make an answer call functions; none where the model may do as it likes.

    A call that is forced has the schema of its function, as every call has of functions one of which is
    `strict`; the calls of the others are objects then.

    Args:
      tools: of the request.
      choice: "required" = at least one call and nothing else, a function = one call of it.
      parallel: False = "required" is one call.
    """
    if not tools or choice == "none":
        return {}
    if choice == "required" or isinstance(choice, NamedTool):
        named = choice.function.name if isinstance(choice, NamedTool) else None
        asked = [tool for tool in tools if named in (None, tool.function.name)]
        more = named is None and parallel is not False
        return {"lark": _calls(asked, more=more)} if asked else {}
    if not any(tool.function.strict for tool in tools):
        return {}
    return {
        "structural_tags": [
            {
                "trigger": BEGIN,
                "begin": _opening(tool),
                "json_schema": _schema(tool) if tool.function.strict else {"type": "object"},
                "end": _CLOSING,
            }
            for tool in tools
        ]
    }


_CLOSING = f"}}\n{END}"


def _opening(tool: Tool) -> str:
    return f'{BEGIN}\n{{"name": {json.dumps(tool.function.name)}, "arguments": '


def _schema(tool: Tool) -> dict[str, Any]:
    """Arguments are an object, and none if nothing is said of them."""
    parameters = tool.function.parameters
    return {"type": "object", **({"additionalProperties": False} if parameters is None else parameters)}


def _calls(tools: Sequence[Tool], *, more: bool) -> str:
    """In llguidance's Lark: one call, or several on lines of their own."""
    rules = [f"start: call{' (' + json.dumps(chr(10)) + ' call)*' if more else ''}"]
    rules.append("call: " + " | ".join(f"call_{number}" for number in range(len(tools))))
    for number, tool in enumerate(tools):
        opening, closing = (json.dumps(text, ensure_ascii=False) for text in (_opening(tool), _CLOSING))
        rules.append(f"call_{number}: {opening} arguments_{number} {closing}")
        rules.append(f"arguments_{number}: %json {json.dumps(_schema(tool))}")
    return "\n".join(rules)
