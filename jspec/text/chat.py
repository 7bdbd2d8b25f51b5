"""Chat templates, rendered as transformers renders them."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

# Names under which a message's reasoning is passed; templates read one or the other.
_REASONING_KEYS = ("reasoning_content", "thinking", "reasoning")


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    /,
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    documents: Sequence[Mapping[str, Any]] | None = None,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The text that a chat template makes of messages.

    The template is foreign code: it runs in jinja2's sandbox and sees nothing but JSON values.

    Args:
      template: jinja2 source.
      messages: each with "role" and, usually, "content"; keys whose value is None count as missing.
      tools: JSON schemas of functions, for templates that know tools.
      documents: for templates that know retrieval.
      add_generation_prompt: whether to end with the header of the assistant's next message.
      **variables: all else that the template reads: bos_token, enable_thinking, ...

    Raises:
      ValueError: no messages; a value that is not JSON; the template is broken or refuses the messages.

    Source: rendering rules of transformers 5 (utils/chat_template_utils.py): environment, globals, and
    what is done to messages before. Differences: functions as tools, message objects and
    `continue_final_message` are refused or unknown; the JSON rule replaces placeholders for other objects.
    """
    if isinstance(messages, (str, Mapping)) or not messages:
        raise ValueError(
            f"messages: expected a list of at least one message, got {messages!r}; pass text as text"
        )
    values = {
        **_json_value("template variables", variables),
        "messages": [_message(message) for message in messages],
        "tools": _json_value("tools", tools),
        "documents": _json_value("documents", documents),
        "add_generation_prompt": add_generation_prompt,
    }
    try:
        return _compile(template).render(values)
    except jinja2.TemplateSyntaxError as error:
        raise ValueError(
            f"chat template: expected jinja2, got an error in line {error.lineno}: {error}"
        ) from error
    except (jinja2.TemplateError, TypeError) as error:
        raise ValueError(f"messages: the chat template refuses them: {error}") from error


def _message(message: Any) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise ValueError(f'messages: expected {{"role": ..., "content": ...}}, got {message!r}')
    value = {key: item for key, item in _json_value("messages", message).items() if item is not None}
    for key in _REASONING_KEYS:
        if key in value:
            # "thinking" comes first, in case a template shows the message as JSON.
            return {"thinking": value[key]} | value | {"reasoning_content": value[key]}
    return value


def _json_value(name: str, value: Any) -> Any:
    """A copy of `value` made of exact JSON types, so that a template gets no methods to play with."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # not str(value): an enum's own __str__ names its member
    for kind in (int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_json_value(name, key): _json_value(name, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_value(name, item) for item in value]
    raise ValueError(f"{name}: expected JSON values, got a {type(value).__name__}; convert it first")


class _GenerationTag(jinja2.ext.Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text.

    Here it is just shown, between the variables `generation_begins` and `generation_ends` if there are any.
    """

    tags = {"generation"}  # noqa: RUF012  jinja2 reads a plain set

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)

        def shown(variable: str) -> jinja2.nodes.Node:
            return jinja2.nodes.Output([jinja2.nodes.Name(variable, "load")], lineno=line)

        scope = jinja2.nodes.Scope(body, lineno=line)  # what is set inside stays inside
        return [shown("generation_begins"), scope, shown("generation_ends")]


@functools.lru_cache(maxsize=32)
def _compile(template: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment.from_string(template)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces jinja2's filter, which escapes HTML characters."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)
