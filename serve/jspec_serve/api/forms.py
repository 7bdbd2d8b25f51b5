"""The form of an answer as requests say it: OpenAI's response formats, a field for every other grammar."""

import types
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from jspec.grammar.grammar import Grammar, grammar_from_json
from jspec_serve.api.fields import GrammarField, Strict, refused
from jspec_serve.problem import Problem

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]


class TextForm(Strict):
    """Free text."""

    type: Literal["text"]


class JsonObjectForm(Strict):
    """Any JSON object."""

    type: Literal["json_object"]


class Schema(Strict):
    """A JSON schema and its name. It always holds: `strict` is taken as true."""

    name: Name
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    description: str | None = None
    strict: bool | None = None


class JsonSchemaForm(Strict):
    """JSON of a schema, as chats say it."""

    type: Literal["json_schema"]
    json_schema: Schema


class FlatJsonSchemaForm(Schema):
    """The same as responses say it."""

    type: Literal["json_schema"]


ChatForm = Annotated[TextForm | JsonObjectForm | JsonSchemaForm, Field(discriminator="type")]
ResponseForm = Annotated[TextForm | JsonObjectForm | FlatJsonSchemaForm, Field(discriminator="type")]


def grammar_of(
    form: TextForm | JsonObjectForm | JsonSchemaForm | FlatJsonSchemaForm | None,
    extra: GrammarField | None,
    calls: Mapping[str, Any] = types.MappingProxyType({}),
) -> Grammar | None:
    """The grammar that a request asks for; None = free text.

    Args:
      form: its response format.
      extra: its field `grammar`, which beside a response format may only say after which text that begins.
      calls: what its tools ask for, see `jspec_serve.api.call_forms`; there is no other form beside them.

    Raises:
      Problem: 400; both name a form, or a value is none.
    """
    values: dict[str, Any] = {} if extra is None else extra.model_dump(exclude_none=True, by_alias=True)
    asked: dict[str, Any] = {}
    if isinstance(form, JsonObjectForm):
        asked = {"json_object": True}
    elif isinstance(form, JsonSchemaForm):
        asked = {"json_schema": form.json_schema.schema_}
    elif isinstance(form, FlatJsonSchemaForm):
        asked = {"json_schema": form.schema_}
    if calls and (asked or set(values) - {"after"}):
        raise Problem(
            400,
            "tools: expected no response format and no grammar of its own beside calls that have a form "
            "(tool_choice, strict), got one; drop one",
            param="tools",
        )
    asked.update(calls)
    if asked and set(values) - {"after"}:
        raise Problem(
            400,
            'grammar: expected nothing but "after" beside a response format, got a form of its own; drop one',
            param="grammar",
        )
    if extra is None and not asked:
        return None
    try:
        return grammar_from_json(values | asked)
    except ValueError as problem:
        raise refused(problem) from problem


def field_names(path: str, schema: str, form: Any) -> Mapping[str, str]:
    """What the engine's names of a grammar are in a request with a response format.

    Args:
      path: of the format.
      schema: of the schema in it.
      form: the format; None or text = there is none.
    """
    if form is None or isinstance(form, TextForm):
        return {}
    return {"grammar": path, "grammar.json_object": path, "grammar.json_schema": schema}
