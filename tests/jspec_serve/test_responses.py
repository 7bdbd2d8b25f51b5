"""/v1/responses through OpenAI's client."""

import json

import openai
import pytest
from calling import CALL_ID, WEATHER, serving_calls
from served import NAME, line

from jspec_serve.api.output_items import OutputItems
from jspec_serve.api.tools import Called

TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_text_and_items_are_the_same_chat(client):
    options = dict(model=NAME, max_output_tokens=5, temperature=0)
    text = client.responses.create(input="two three", **options)
    assert text.output_text == line(7, 5)
    assert text.status == "incomplete"
    assert text.incomplete_details.reason == "max_output_tokens"
    assert (text.usage.input_tokens, text.usage.output_tokens) == (3, 5)
    items = client.responses.create(
        instructions="one",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "two"}]},
            *[item.model_dump(exclude_none=True) for item in text.output],
            {"type": "message", "role": "user", "content": "six"},
        ],
        **options,
    )
    assert items.usage.input_tokens == 2 + 2 + 6 + 2
    assert items.model_extra["spec"]["emitted"] == 5


def test_stream_ends_with_the_whole(client):
    options = dict(
        model=NAME,
        input="two",
        max_output_tokens=12,
        temperature=0,
        top_logprobs=1,
        include=["message.output_text.logprobs"],
    )
    events = list(client.responses.create(**options, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    assert "".join(event.delta for event in deltas) == events[-1].response.output_text == line(7, 12)
    tokens = [entry.token for event in deltas for entry in event.logprobs]
    assert tokens == line(7, 12).split()
    (item,) = events[-1].response.output
    assert [entry.token for entry in item.content[0].logprobs] == tokens


def test_log_probs_of_text_that_was_held_back_are_the_messages():
    items, call = OutputItems(), Called(name="a", arguments="{}")
    for found, log_probs in [
        (["a <"], [1]),
        ([], [2, 3]),
        (["b "], [4]),
        ([], [5]),
        ([call], [6]),
        (["c"], [7]),
    ]:
        items.add(found, log_probs)
    first, called, second = items.values()
    assert called["type"] == "function_call"
    assert first["content"][0]["logprobs"] == [1, 2, 3, 4]
    assert second["content"][0]["logprobs"] == [7]


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_items(stream):
    options = dict(
        model=NAME, input="weather", max_output_tokens=9, temperature=0, tools=[TOOL], stream=stream
    )
    with (
        serving_calls() as calling,
        openai.OpenAI(base_url=f"{calling.url}/v1", api_key="x", max_retries=0) as client,
    ):
        reply = client.responses.create(**options, extra_body={"stop_token_ids": [CALL_ID]})
        if stream:
            events = list(reply)
            (done,) = [one for one in events if one.type == "response.function_call_arguments.done"]
            assert json.loads(done.arguments) == WEATHER["arguments"]
            reply = events[-1].response
        (call,) = reply.output
        assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", *WEATHER.values())
        assert reply.status == "completed"
        history = [
            {"role": "user", "content": "weather"},
            call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ]
        again = client.responses.create(**options | {"input": history, "stream": False})
        assert again.usage.input_tokens > reply.usage.input_tokens


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"n": 2}, "n"),
        ({"input": [{"type": "web_search_call"}]}, "input[0]"),
        ({"input": [{"role": "robot", "content": "x"}]}, "input[0].role"),
        ({"top_logprobs": 1}, "top_logprobs"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.name"),
        ({"max_output_tokens": 99}, "max_output_tokens"),
    ],
)
def test_what_is_wrong_is_named(served, body, param):
    reply = served.post("/v1/responses", **{"input": "two", **body})
    assert reply.status_code == 400, reply.text
    assert reply.json()["error"]["param"] == param, reply.text
