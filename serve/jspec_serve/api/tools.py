"""Functions that a model may call: how clients declare them, and how calls are read from its text.

The format is that of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
"""

import dataclasses
import json
import uuid
from typing import Annotated, Any, Literal

from pydantic import Field

from jspec.text.stop_strings import StopStrings
from jspec.text.tokenizer import Tokenizer
from jspec_serve.api.fields import Strict
from jspec_serve.problem import Problem

BEGIN, END = "<tool_call>", "</tool_call>"


class Function(Strict):
    """A function's name, purpose and JSON schema."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """Only functions can be called."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """Of a choice."""

    name: str


class NamedTool(Strict):
    """A choice of one function."""

    type: Literal["function"]
    function: NamedFunction


ToolChoice = Literal["none", "auto", "required"] | NamedTool


def template_tools(
    tokenizer: Tokenizer, tools: list[Tool] | None, choice: ToolChoice | None, parallel: bool | None
) -> list[dict[str, Any]] | None:
    """The tools that a chat template gets; None = none.

    Raises:
      Problem: 400 for what does not go together or is not served, or a template that reads no tools.
    """
    if not tools:
        if choice not in (None, "none", "auto"):
            raise Problem(
                400, "tool_choice: expected none without tools, got some; pass tools", param="tool_choice"
            )
        return None
    names = [tool.function.name for tool in tools]
    for name in names:
        if names.count(name) > 1:
            raise Problem(
                400, f"tools: expected names of their own, got {name!r} twice; rename one", param="tools"
            )
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise Problem(
            400,
            f"tool_choice: expected one of {', '.join(names)}, got {choice.function.name!r}; name a tool",
            param="tool_choice",
        )
    if parallel is False and choice in (None, "auto"):
        raise Problem(
            400,
            "parallel_tool_calls: expected false only where a call is forced, as nothing here ends a text behind its "
            'first call, got it without; drop it, or set tool_choice to "required" or a function',
            param="parallel_tool_calls",
            code="unsupported_parameter",
        )
    if choice == "none":
        return None
    if not reads_tools(tokenizer):
        raise Problem(
            400,
            f"tools: expected a model whose chat template reads tools and writes calls as {BEGIN}...{END}, got another; "
            "describe the functions in a message",
            param="tools",
            code="unsupported_parameter",
        )
    return [
        {"type": "function", "function": tool.function.model_dump(exclude_none=True, exclude={"strict"})}
        for tool in tools
    ]


def reads_tools(tokenizer: Tokenizer) -> bool:
    """Whether a model's template takes tools and its calls arrive as text in the format read here."""
    templates = tokenizer.chat_templates
    template = templates.get("tool_use", templates.get("default", ""))
    hidden = tokenizer.backend.token_to_id(BEGIN) in tokenizer.special_ids
    return BEGIN in template and "tools" in template and not hidden


@dataclasses.dataclass(frozen=True, kw_only=True)
class Called:
    """One call that a model made."""

    name: str
    arguments: str  # JSON

    def message(self) -> dict[str, Any]:
        """As replies write it."""
        return {
            "id": f"call_{uuid.uuid4().hex[:24]}",
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class CallReader:
    """Finds calls in a text that arrives in pieces, wherever the pieces are cut.

    What looks like a call and is none stays text. White space around calls is dropped.
    """

    def __init__(self) -> None:
        """At the beginning of an answer."""
        self._begin = StopStrings([BEGIN])
        self._block: str | None = None  # what came after BEGIN; None = outside
        self._blank = ""  # white space that may stand before a call
        self._after_call = False  # nothing but white space has come since the last one
        self.num_calls = 0

    def push(self, piece: str, *, last: bool) -> list[str | Called]:
        """Takes the next piece; returns text and calls that are final, in order.

        Args:
          piece: of the text.
          last: nothing will follow.
        """
        found: list[str | Called] = []
        rest: str | None = piece
        while rest is not None:
            rest = self._outside(rest, found) if self._block is None else self._inside(rest, found)
        if last:
            self._finish(found)
        return found

    def _outside(self, piece: str, found: list[str | Called]) -> str | None:
        """Takes text up to a call; returns what follows its BEGIN, None if there is none yet."""
        held = self._begin.held
        text, begin = self._begin.push(piece)
        self._text(text, found)
        if begin is None:
            return None
        self._begin, self._block = StopStrings([BEGIN]), ""
        return (held + piece)[len(text) + len(BEGIN) :]

    def _inside(self, piece: str, found: list[str | Called]) -> str | None:
        assert self._block is not None
        before = len(self._block)
        self._block += piece
        at = self._block.find(END, max(before - len(END) + 1, 0))
        while at >= 0:
            called, is_open = _parse(self._block[:at])
            rest = self._block[at + len(END) :]
            if not is_open:
                self._end(called, self._block[: at + len(END)], found)
                return rest
            at = self._block.find(END, at + 1)  # that one stood inside a string
        return None

    def _end(self, called: Called | None, block: str, found: list[str | Called]) -> None:
        self._block = None
        if called is None:
            self._text(BEGIN + block, found)
            return
        self._blank, self._after_call = "", True
        self.num_calls += 1
        found.append(called)

    def _text(self, text: str, found: list[str | Called]) -> None:
        text = self._blank + text
        solid = text.rstrip()
        self._blank = text[len(solid) :]
        if solid:
            found.append(solid.lstrip() if self._after_call else solid)
            self._after_call = False

    def _finish(self, found: list[str | Called]) -> None:
        if self._block is not None:
            called, _ = _parse(self._block)  # the end of a turn may stand in for END
            self._end(called, self._block, found)
        else:
            self._text(self._begin.flush(), found)
        if self._blank and not self.num_calls:
            found.append(self._blank)


def _parse(block: str) -> tuple[Called | None, bool]:
    """The call of a block, and whether a string is still open at its end."""
    try:
        value = json.loads(block)
    except json.JSONDecodeError as problem:
        return None, problem.msg.startswith("Unterminated string")
    except RecursionError:
        return None, False
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None, False
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        return Called(name=value["name"], arguments=arguments), False
    if not isinstance(arguments, dict):
        return None, False
    return Called(name=value["name"], arguments=json.dumps(arguments, ensure_ascii=False)), False
