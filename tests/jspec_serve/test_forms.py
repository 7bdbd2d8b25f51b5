"""Answers with a form through a socket: response formats, the field `grammar`, and what is wrong with them."""

import dataclasses
import json
import re

import jax.numpy as jnp
import numpy as np
import openai
import pytest
from contract.letters import BYTES_END, bytes_tokenizer
from served import NAME, Background, serving

from jspec.decode import Method, Models
from jspec.drafters.ngram import ngram
from jspec.engine import Engine
from jspec.targets.table import TableTarget

CHAT = [{"role": "user", "content": "say"}]
SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "kind": {"enum": ["a", "bc"]}},
    "required": ["on", "kind"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "switch", "parameters": SCHEMA}},
    {"type": "function", "function": {"name": "now"}},
]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
    "{% for message in messages %}{{ message.content }}{% endfor %}:{# <tool_call> #}"
)
STRICT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}


@pytest.fixture(scope="module")
def served():
    """A server that says bytes as they come, but white space: a grammar may have any amount of that."""
    table = np.random.default_rng(0).normal(size=(258, 258)).astype(np.float32)
    table[:, [9, 10, 13, 32]] = -9.0
    engine = Engine(
        method=Method(target=TableTarget(vocab_size=258, max_context=256), drafter=ngram(draft_length=3)),
        models=Models(target=(jnp.asarray(table),), drafter=()),
        tokenizer=dataclasses.replace(bytes_tokenizer(), chat_templates={"default": TEMPLATE}),
        eos_ids=(BYTES_END,),
        max_slots=2,
        page_size=8,
        chunks=(15,),
    )
    with serving(engine) as one:
        yield one


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_schema_through_openais_client(client):
    for seed in range(4):
        reply = client.chat.completions.create(
            model=NAME, messages=CHAT, response_format=STRICT, seed=seed, max_tokens=60
        )
        (choice,) = reply.choices
        assert choice.finish_reason == "stop"
        said = json.loads(choice.message.content)
        assert isinstance(said["on"], bool) and said["kind"] in ("a", "bc")


def test_stream_of_a_schema_is_the_whole(client):
    options = dict(model=NAME, messages=CHAT, response_format=STRICT, seed=3, max_tokens=60)
    whole = client.chat.completions.create(**options).choices[0]
    parts = [part.choices[0] for part in client.chat.completions.create(**options, stream=True)]
    assert "".join(part.delta.content or "" for part in parts) == whole.message.content
    assert parts[-1].finish_reason == "stop"


def test_schema_of_a_response(client):
    form = {"type": "json_schema", "name": "thing", "schema": SCHEMA, "strict": True}
    reply = client.responses.create(model=NAME, input="say", text={"format": form}, max_output_tokens=60)
    assert set(json.loads(reply.output_text)) == {"on", "kind"}
    assert reply.status == "completed"
    assert reply.text.format.name == "thing" and reply.text.format.schema_ == SCHEMA


def test_json_object_begins_and_is_cut_by_its_length(client):
    reply = client.chat.completions.create(
        model=NAME, messages=CHAT, response_format={"type": "json_object"}, max_tokens=5, seed=1
    )
    assert reply.choices[0].message.content[0] == "{"


@pytest.mark.parametrize(
    ("grammar", "wanted"),
    [
        ({"regex": "[0-9]{3}-[a-f]"}, "[0-9]{3}-[a-f]"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"lark": 'start: "<" /[xy]{4}/ ">"'}, "<[xy]{4}>"),
        ({"ebnf": 'root ::= "<" [xy] "!"'}, "<[xy]!"),
        ({"json_schema": {"type": "boolean"}}, "true|false"),
        ({"regex": "[0-9]", "after": "="}, r"(?s)[^=]*=[0-9]"),
    ],
)
def test_grammars_of_every_kind(served, grammar, wanted):
    after = {"logit_bias": {str(ord("=")): 100}} if "after" in grammar else {}
    for path, prompt in (("completions", {"prompt": "x"}), ("chat/completions", {"messages": CHAT})):
        reply = served.post(f"/v1/{path}", **prompt, max_tokens=40, seed=2, grammar=grammar, **after).json()
        choice = reply["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        assert re.fullmatch(wanted, text), text
        assert choice["finish_reason"] == "stop"


def test_marker_of_a_response_format_is_said_beside_it(served):
    body = {"response_format": STRICT, "grammar": {"after": "="}, "logit_bias": {str(ord("=")): 100}}
    reply = served.post("/v1/chat/completions", messages=CHAT, max_tokens=60, **body).json()
    assert set(json.loads(reply["choices"][0]["message"]["content"].rpartition("=")[2])) == {"on", "kind"}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"response_format": {"type": "json"}}, "response_format", "'json'"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 3}}},
            "response_format.json_schema.schema",
            "got 3",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "schema": {"type": "it"}},
                }
            },
            "response_format.json_schema.schema",
            "expected a form that an answer can have",
        ),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {
                        "name": "x",
                        "schema": {"type": "string", "minLength": 2, "maxLength": 1},
                    },
                }
            },
            "response_format.json_schema.schema",
            "Unsatisfiable",
        ),
        ({"response_format": STRICT, "grammar": {"regex": "a"}}, "grammar", "drop one"),
        ({"grammar": {"regex": "(a"}}, "grammar.regex", "unclosed group"),
        ({"grammar": {"regex": "a", "lark": "b"}}, "grammar", "set exactly one"),
        ({"grammar": {"regexp": "a"}}, "grammar.regexp", "unknown field"),
        ({"grammar": {"structural_tags": [{"begin": "<"}]}}, "grammar.structural_tags", "got neither"),
        ({"grammar": {}}, "grammar", "got none"),
    ],
)
def test_what_is_wrong_with_a_form_is_named(served, body, param, said):
    reply = served.post("/v1/chat/completions", messages=CHAT, max_tokens=9, **body)
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", param), error
    assert said in error["message"], error


def test_grammar_that_comes_to_nothing_fails_alone(served, monkeypatch):
    """A target without an exclamation mark: it can begin the form, and never end it."""
    compiler = served.service.engine._grammars
    compiler.prepare()  # else what is put back would have been made of the other tokens
    tokens = list(compiler._vocabulary.tokens)
    tokens[ord("!")] = b""
    monkeypatch.setattr(compiler._vocabulary, "tokens", tokens)
    monkeypatch.setattr(compiler, "_llguidance", compiler._vocabulary.llguidance())
    dead = Background(served, prompt="x", grammar={"regex": "[ab]{3}!"}, max_tokens=20)
    fine = Background(served, prompt="x", grammar={"regex": "[ab]{12}"}, max_tokens=20)
    assert re.fullmatch("[ab]{12}", fine.result().json()["choices"][0]["text"])
    assert dead.result().status_code == 400
    error = dead.result().json()["error"]
    assert (error["code"], error["param"]) == ("grammar_failed", "grammar")
    assert "the grammar allows nothing here" in error["message"]
    streamed = Background(served, prompt="x", grammar={"regex": "[ab]{3}!"}, max_tokens=20, stream=True)
    last = streamed.result().text.strip().split("\n\n")[-1]
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "grammar_failed"
    assert len(served.service.engine._runner.free_slots) == 2
    assert served.post("/v1/completions", prompt="x", max_tokens=2).status_code == 200


def test_answers_of_one_call_have_each_their_own_grammar(served):
    reply = served.post(
        "/v1/completions", prompt="x", n=4, seed=1, max_tokens=20, grammar={"regex": "[ab]{8}"}
    ).json()
    texts = [choice["text"] for choice in reply["choices"]]
    assert all(re.fullmatch("[ab]{8}", text) for text in texts)
    assert len(set(texts)) > 1


def arguments_fit(name: str, arguments: str) -> bool:
    said = json.loads(arguments)
    if name == "now":
        return said == {}
    return set(said) == {"on", "kind"} and isinstance(said["on"], bool) and said["kind"] in ("a", "bc")


@pytest.mark.parametrize("parallel", [None, False])
def test_required_calls_are_made_and_fit_their_schemas(client, parallel):
    options = {} if parallel is None else {"parallel_tool_calls": parallel}
    counts, names = set(), set()
    for seed in range(4):
        # Which is called is up to one letter; the text goes on if it may.
        options["logit_bias"] = {str(ord("s")): 30 * (seed % 2), str(BYTES_END): -100}
        choice = client.chat.completions.create(
            model=NAME,
            messages=CHAT,
            tools=TOOLS,
            tool_choice="required",
            seed=seed,
            max_tokens=200,
            **options,
        ).choices[0]
        calls = choice.message.tool_calls
        counts.add(len(calls))
        names |= {call.function.name for call in calls}
        # Only a call that was cut off is text.
        assert choice.finish_reason == "length" or choice.message.content is None
        assert all(arguments_fit(call.function.name, call.function.arguments) for call in calls)
    assert names == {"switch", "now"}
    assert counts == {1} if parallel is False else max(counts) > 1


def test_a_named_function_is_called_once_streamed_or_not(client):
    for name in ("switch", "now"):
        options = dict(
            model=NAME,
            messages=CHAT,
            tools=TOOLS,
            tool_choice={"type": "function", "function": {"name": name}},
            seed=4,
            max_tokens=90,
        )
        (call,) = client.chat.completions.create(**options).choices[0].message.tool_calls
        assert call.function.name == name and arguments_fit(name, call.function.arguments)
        parts = client.chat.completions.create(**options, stream=True)
        deltas = [one for part in parts for one in part.choices[0].delta.tool_calls or []]
        assert [(one.function.name, one.function.arguments) for one in deltas] == [
            (name, call.function.arguments)
        ]


def test_a_response_calls_what_it_has_to(client):
    tools = [{"type": "function", "name": "switch", "parameters": SCHEMA, "strict": True}]
    choice = {"type": "function", "name": "switch"}
    reply = client.responses.create(
        model=NAME, input="say", tools=tools, tool_choice=choice, max_output_tokens=90
    )
    (call,) = reply.output
    assert (call.type, call.name) == ("function_call", "switch") and arguments_fit("switch", call.arguments)
    assert reply.tool_choice.name == "switch"


def test_strict_calls_fit_and_text_stays_free(served):
    strict = [{"type": "function", "function": {**TOOLS[0]["function"], "strict": True}}, TOOLS[1]]
    body = dict(messages=CHAT, tools=strict, seed=1, max_tokens=60)
    free = served.post("/v1/chat/completions", **body, logit_bias={str(ord("<")): -100}).json()["choices"][0]
    assert len(free["message"]["content"]) > 20 and "tool_calls" not in free["message"]
    compiled = served.service.engine._grammars._compiled
    (source,) = (text for text in compiled if text.startswith("structural_tags"))
    matcher = compiled[source].deep_copy()
    said = b'so: <tool_call>\n{"name": "switch", "arguments": {"on": true, "kind": "bc"}}\n</tool_call> ok'
    assert matcher.validate_tokens(list(said)) == len(said)
    for wrong in (b'{"on": 1}', b"{}", b'{"on": true, "kind": "c"}'):
        begun = b'<tool_call>\n{"name": "switch", "arguments": '
        assert len(begun) <= matcher.validate_tokens(list(begun + wrong)) < len(begun + wrong)
    assert matcher.validate_tokens(list(b"<tool_call>x")) == len(b"<tool_call>")


@pytest.mark.parametrize("beside", [{"response_format": STRICT}, {"grammar": {"regex": "a"}}])
def test_forced_calls_have_no_other_form_beside_them(served, beside):
    body = dict(messages=CHAT, tools=TOOLS, tool_choice="required")
    reply = served.post("/v1/chat/completions", **body, **beside)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "tools")
