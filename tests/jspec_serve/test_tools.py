"""Functions that a model may call: what is read from its text, however it is cut."""

import dataclasses
import json

import openai
import pytest
from calling import CALL_ID, TOOL, WEATHER, block, serving_calls
from hypothesis import given
from hypothesis import strategies as st
from served import NAME

from jspec_serve.api.tools import Called, CallReader

CASES = {
    "no call": ("Hello <tool", ["Hello <tool"]),
    "spaces stay": ("Hello \n", ["Hello \n"]),
    "one call": (block(WEATHER), [WEATHER]),
    "text and two calls": (
        f"Let me see.\n{block(WEATHER)}\n{block(WEATHER)}\n",
        ["Let me see.", WEATHER, WEATHER],
    ),
    "text behind a call": (f"{block(WEATHER)}\nIt is done. \n", [WEATHER, "It is done."]),
    "no arguments": (block({"name": "now"}), [{"name": "now", "arguments": {}}]),
    "the tag in a string": (
        block({"name": "say", "arguments": {"text": "</tool_call> <tool_call>"}}),
        [{"name": "say", "arguments": {"text": "</tool_call> <tool_call>"}}],
    ),
    "not closed": (block(WEATHER).removesuffix("</tool_call>"), [WEATHER]),
    "cut off": ('<tool_call>\n{"name": "wea', ['<tool_call>\n{"name": "wea']),
    "no JSON": ("<tool_call>weather</tool_call> ok", ["<tool_call>weather</tool_call> ok"]),
    "no name": (block({"arguments": {}}), [block({"arguments": {}})]),
    "arguments that are none": (block({"name": "a", "arguments": 3}), [block({"name": "a", "arguments": 3})]),
}


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
def test_calls_are_found_however_the_text_is_cut(case, data):
    text, expected = CASES[case]
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    reader, found = CallReader(), []
    for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
        found += reader.push(text[start:end], last=False)
    found += reader.push("", last=True)
    joined = []
    for one in found:
        if isinstance(one, Called):
            joined.append({"name": one.name, "arguments": json.loads(one.arguments)})
        elif joined and isinstance(joined[-1], str):
            joined[-1] += one
        else:
            joined.append(one)
    assert joined == expected


@pytest.fixture(scope="module")
def calling():
    with serving_calls() as one:
        yield one


def test_tools_through_openais_client(calling):
    options = dict(
        model=NAME,
        messages=[{"role": "user", "content": "weather"}],
        max_tokens=1,
        temperature=0,
        tools=[TOOL],
        tool_choice="auto",
    )
    with openai.OpenAI(base_url=f"{calling.url}/v1", api_key="x", max_retries=0) as client:
        whole = client.chat.completions.create(**options).choices[0]
        (call,) = whole.message.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Köln"})
        assert whole.message.content is None
        assert whole.finish_reason == "length"
        parts = list(client.chat.completions.create(**options, stream=True))
        deltas = [one for part in parts for one in part.choices[0].delta.tool_calls or []]
        assert [(one.index, one.function.name) for one in deltas] == [(0, "weather")]
        stopped = client.chat.completions.create(
            **options | {"max_tokens": 9}, extra_body={"stop_token_ids": [CALL_ID]}
        )
        assert stopped.choices[0].finish_reason == "tool_calls"
        plain = client.chat.completions.create(**options | {"tool_choice": "none"})
        assert plain.choices[0].message.content.startswith("<tool_call>")
        history = [
            *options["messages"],
            whole.message.model_dump(include={"role", "content", "tool_calls"}),
            {"role": "tool", "tool_call_id": call.id, "content": "sunny"},
        ]
        assert client.chat.completions.create(**options | {"messages": history}).choices


@pytest.mark.parametrize(
    ("body", "param"),
    [
        # The words of this model spell no bytes, so that nothing can be forced.
        ({"tools": [TOOL], "tool_choice": "required"}, "tools"),
        (
            {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "wether"}}},
            "tool_choice",
        ),
        ({"tools": [TOOL], "parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
    ],
)
def test_what_cannot_be_kept_is_refused(calling, body, param):
    reply = calling.post("/v1/chat/completions", messages=[{"role": "user", "content": "two"}], **body)
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param


def test_template_without_tools_is_refused(calling):
    service = calling.service
    whole, service.tokenizer = (
        service.tokenizer,
        dataclasses.replace(service.tokenizer, chat_templates={"default": "x"}),
    )
    try:
        reply = calling.post(
            "/v1/chat/completions", messages=[{"role": "user", "content": "two"}], tools=[TOOL]
        )
    finally:
        service.tokenizer = whole
    assert reply.json()["error"]["code"] == "unsupported_parameter"
