"""What clients get, through a real socket."""

import json
import re
import threading

import httpx2
import numpy as np
import openai
import pytest
from contract.engines import TABLE
from contract.words import WORDS
from served import LIMITS, NAME, line, until

from jspec.settings import Settings
from jspec_serve.app import BODIES

CHAT = [{"role": "user", "content": "two three"}]  # the template ends it with "seven"


@pytest.fixture
def client(served):
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as one:
        yield one


def test_chat_through_openais_client(client, served):
    reply = client.chat.completions.create(model=NAME, messages=CHAT, max_tokens=9, temperature=0)
    (choice,) = reply.choices
    assert choice.message.content == line(7, 9)
    assert choice.finish_reason == "length"
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens, reply.usage.total_tokens) == (3, 9, 12)
    spec = choice.model_extra["spec"]
    assert spec["accepted"] + spec["rounds"] + 1 == spec["emitted"] == 9
    assert spec["verified"] >= spec["accepted"] > 0
    assert sum(spec["accept_histogram"]) == spec["rounds"]
    assert spec["off"] is None


def test_stream_says_the_same_as_the_whole(client):
    options = dict(model=NAME, messages=CHAT, max_tokens=20, temperature=1, seed=5, n=2, logprobs=True)
    whole = client.chat.completions.create(**options)
    parts = list(
        client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    assert all(part.usage is None for part in parts[:-1])
    assert parts[-1].usage == whole.usage
    assert parts[-1].choices == []
    for index in range(2):
        mine = [choice for part in parts for choice in part.choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(one.delta.content or "" for one in mine) == whole.choices[index].message.content
        tokens = [entry for one in mine if one.logprobs for entry in one.logprobs.content]
        assert tokens == whole.choices[index].logprobs.content
        assert len(tokens) == 20
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + ["length"]
        assert mine[-1].model_extra["spec"] == whole.choices[index].model_extra["spec"]
    assert whole.choices[0].message.content != whole.choices[1].message.content


def test_many_together_equal_the_engines_own(served, engines):
    """Greedy and seeded requests, more than there are slots, with every kind of prompt."""
    settings = [
        Settings(
            max_tokens=5 + n, temperature=float(n % 2), seed=n, top_k=5 if n % 3 else None, draft_length=n % 4
        )
        for n in range(8)
    ]
    replies = {}

    def ask(n):
        one = settings[n]
        replies[n] = served.post(
            "/v1/completions",
            prompt=[n, 1],
            max_tokens=one.max_tokens,
            temperature=one.temperature,
            seed=one.seed,
            **({} if one.top_k is None else {"top_k": one.top_k}),
            speculation={"draft_length": one.draft_length} if n % 4 else "off",
        ).json()

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    until(lambda: served.service.thread.unfinished == 0)
    own = engines["oracle"].generate([[n, 1] for n in range(8)], settings)
    for n, result in enumerate(own):
        choice = replies[n]["choices"][0]
        assert choice["text"] == result.text, n
        assert (choice["spec"]["off"] == "the request turned it off") == (n % 4 == 0)


def test_completion_log_probs_are_the_models(client):
    reply = client.completions.create(model=NAME, prompt="two", max_tokens=4, temperature=0, logprobs=2)
    got = reply.choices[0].logprobs
    assert " ".join(got.tokens) == reply.choices[0].text == line(2, 4)
    best = TABLE[2].max() - float(np.log(np.exp(TABLE[2]).sum()))
    assert got.token_logprobs[0] == pytest.approx(best, abs=1e-5)
    assert list(got.top_logprobs[0]) and len(got.top_logprobs[0]) == 2
    text = reply.choices[0].text
    assert [text[start:].split()[0] for start in got.text_offset] == got.tokens


def test_stop_strings_end_the_text_before_them(client):
    words = line(2, 12).split()
    stop = next(word for word in words if words.index(word) > 2)
    reply = client.completions.create(model=NAME, prompt="two", max_tokens=30, temperature=0, stop=[stop])
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text.split() == words[: words.index(stop)]
    assert reply.usage.completion_tokens == words.index(stop) + 1


def test_prompts_of_all_kinds_and_echo(client):
    for prompt in ("two", ["two"], [2], [[2]]):
        reply = client.completions.create(model=NAME, prompt=prompt, max_tokens=3, temperature=0)
        assert [choice.text for choice in reply.choices] == [line(2, 3)]
    reply = client.completions.create(
        model=NAME, prompt=["two", "one"], max_tokens=3, temperature=0, n=2, extra_body={"echo": True}
    )
    assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
    assert [choice.text[:3] for choice in reply.choices] == ["two", "two", "one", "one"]
    assert reply.usage.prompt_tokens == 2


def test_bias_and_ids_reach_the_engine(served):
    reply = served.post(
        "/v1/completions", prompt="two", max_tokens=5, temperature=0, logit_bias={"3": 100}, ignore_eos=True
    ).json()
    assert reply["choices"][0]["text"] == " ".join(["three"] * 5)
    reply = served.post(
        "/v1/completions", prompt="two", max_tokens=5, temperature=0, allowed_token_ids=[4], min_tokens=2
    ).json()
    assert reply["choices"][0]["text"] == " ".join(["four"] * 5)


def test_chunks_can_tell_where_tokens_came_from(client):
    parts = list(
        client.chat.completions.create(
            model=NAME,
            messages=CHAT,
            max_tokens=9,
            temperature=0,
            stream=True,
            stream_options={"include_tokens": True},
        )
    )
    told = [part.choices[0].model_extra["tokens"] for part in parts]
    assert sum(len(one["ids"]) for one in told) == 9
    first = int(TABLE[7].argmax())
    assert told[0] == {"ids": [first], "texts": [WORDS[first]], "drafted": [False], "verified": None}
    rest = {"ids": told[1]["ids"], "texts": told[1]["texts"]}
    assert told[1] == {**rest, "drafted": [True, True, True, False], "verified": 3}
    assert "".join(text for one in told for text in one["texts"]) == line(7, 9)


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        ({"colour": 1}, "colour", "unknown field"),
        ({"response_format": {"type": "json_object"}}, "response_format", "works on words"),
        ({"functions": []}, "functions", "not supported: it is deprecated; use tools"),
        ({"temperature": "1"}, "temperature", "valid number, got '1'"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": True}, "temperature", "valid number"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 62}, "max_tokens", "expected at most 61, because 3 of the context's 64"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens", "drop one"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "lower it or raise max_tokens"),
        ({"n": 5}, "n", "expected at most 4"),
        ({"logit_bias": {"8": 1}}, "logit_bias", "vocabulary size 8"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x", "pattern"),
        ({"logprobs": True, "top_logprobs": 3}, "logprobs", "at most 2"),
        ({"top_logprobs": 1}, "top_logprobs", "set logprobs too"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "drop them or stream"),
        (
            {"speculation": {"min_confidence": 1, "draft_length": 1}},
            "speculation.min_confidence",
            "expected 0, as the drafter gives no confidence",
        ),
        ({"speculation": {"min_confidence": 1.5}}, "speculation.min_confidence", "less than or equal to 1"),
        ({"speculation": "maybe"}, "speculation", "got 'maybe'"),
        ({"stop": [""]}, "stop[0]", "at least 1 character"),
        ({"stop_token_ids": [0, 1, 2, 3, 4]}, "stop_token_ids", "at most 4"),
        ({"messages": []}, "messages", "at least 1 item"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "got 'robot'"),
        ({"messages": [{"role": "user"}]}, "messages[0]", "write what is said"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_call_id": "1"}]},
            "messages[0]",
            "tool_call_id",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "messages[0].content[0].type",
            "'text'",
        ),
        ({"messages": [{"role": "user", "content": "two " * 70}]}, "messages", "expected at most 63 tokens"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", "fields of their own"),
    ],
)
def test_what_is_wrong_is_named(served, body, param, said):
    reply = served.post("/v1/chat/completions", **{"messages": CHAT, **body})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param, error
    assert said in error["message"], error


@pytest.mark.parametrize(
    ("prompts", "param"), [([[8]], "prompt"), ([[8], [1]], "prompt[0]"), ([[1], [8]], "prompt[1]")]
)
def test_prompt_at_fault_is_numbered_as_it_was_sent(served, prompts, param):
    error = served.post("/v1/completions", prompt=prompts, n=2, max_tokens=3).json()["error"]
    assert error["param"] == param
    assert error["message"].startswith(f"{param}: expected ids below 8, got 8")


@pytest.mark.parametrize("path", sorted(BODIES))
def test_every_field_is_validated_and_named(served, path):
    """No field takes just anything, and none that is not served is passed over."""
    model = BODIES[path]
    for name in model.model_fields:
        reply = served.post(path, **{name: [[{"x": []}]]})
        assert reply.status_code == 400, name
        assert re.search(rf"(^|; ){name}[\[:.]", reply.json()["error"]["message"]), reply.text
    for name in model.UNSUPPORTED:
        reply = served.post(path, **{name: "x"})
        assert reply.status_code == 400, name
        assert f"{name}: not supported: " in reply.json()["error"]["message"]


def test_every_unknown_field_is_named(served):
    error = served.post("/v1/completions", prompt="two", colour=1, suffix="x", size=None).json()["error"]
    assert {part.partition(":")[0] for part in error["message"].split("; ")} >= {"colour", "suffix", "size"}
    assert error["code"] == "unsupported_parameter"


def test_null_is_the_same_as_leaving_out(served):
    body = {"temperature": 0, "max_tokens": 3, "seed": None, "stop": None, "suffix": None, "stream": None}
    assert served.post("/v1/completions", prompt="two", **body).json()["choices"][0]["text"] == line(2, 3)


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b"null", 400),
        (b'"two"', 400),
        (b'{"model": "table", "prompt": "\xff\xfe"}', 400),
        (b'{"model": "table", "prompt": "\\ud800"}', 400),
        (b'{"model": "table", "prompt": "two", "temperature": NaN}', 400),
        (b'{"model": "table", "prompt": "two", "seed": 1e400}', 400),
        (b'{"model": "table", "prompt": "two", "seed": ' + b"9" * 5000 + b"}", 400),
        (b"[" * 9000 + b"]" * 9000, 400),
        (b'{"model": "other", "prompt": "two"}', 404),
        (b'{"model": "table", "prompt": "' + b"two " * 6000 + b'"}', 413),
    ],
)
def test_bodies_that_are_no_request(served, content, status):
    with served.client() as client:
        reply = client.post("/v1/completions", content=content, headers={"content-type": "application/json"})
        assert reply.status_code == status, reply.text
        assert reply.json()["error"]["message"]
        chunks = iter([content[:1], content[1:]])  # without a content-length
        reply = client.post("/v1/completions", content=chunks, headers={"content-type": "application/json"})
        assert reply.status_code == status, reply.text


def test_paths_methods_and_types_that_do_not_fit(served):
    with served.client() as client:
        assert client.get("/v1/nothing").status_code == 404
        assert client.get("/v1/nothing").json()["error"]["message"] == "no such path: /v1/nothing"
        assert client.get("/v1/completions").status_code == 405
        reply = client.post("/v1/completions", content=b"{}", headers={"content-type": "text/plain"})
        assert reply.status_code == 415


def test_models_tokens_health_and_info(served, client):
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    ids = served.post("/tokenize", prompt="two three").json()
    assert ids == {"tokens": [2, 3], "count": 2, "max_model_len": 64}
    assert served.post("/tokenize", messages=CHAT).json()["tokens"] == [2, 3, 7]
    assert served.post("/detokenize", tokens=[2, 3]).json() == {"prompt": "two three"}
    assert served.post("/detokenize", tokens=[8]).json()["error"]["param"] == "tokens[0]"
    with served.client() as http:
        assert http.get("/health").json() == {"status": "ok"}
        info = http.get("/server_info").json()
    assert info["max_slots"] == 3
    assert info["limits"]["max_waiting"] == LIMITS.max_waiting


def test_requests_are_described_for_machines(served):
    with served.client() as client:
        described = client.get("/openapi.json").json()
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        operation = described["paths"][path]["post"]
        assert set(operation["responses"]) == {"200", "4XX", "5XX"}
        name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        assert described["components"]["schemas"][name]["additionalProperties"] is False


def test_request_ids_may_repeat(served):
    def ask():
        body = {"model": NAME, "prompt": "two", "max_tokens": 9, "temperature": 0}
        with served.client() as client:
            replies.append(client.post("/v1/completions", json=body, headers={"x-request-id": "same"}))

    replies: list[httpx2.Response] = []
    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [reply.headers["x-request-id"] for reply in replies] == ["same"] * 3
    assert len({reply.json()["id"] for reply in replies}) == 3
    assert {reply.json()["choices"][0]["text"] for reply in replies} == {line(2, 9)}


def test_events_are_as_openai_writes_them(served):
    body = {"model": NAME, "prompt": "two", "max_tokens": 4, "temperature": 0, "stream": True}
    with served.client() as client, client.stream("POST", "/v1/completions", json=body) as reply:
        assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
        events = reply.read().decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == line(2, 4)
    assert all("usage" not in chunk for chunk in chunks)


def test_metrics_count_what_was_answered(served):
    def read(name: str) -> float:
        with served.client() as client:
            lines = client.get("/metrics").text.splitlines()
        return float(next(one for one in lines if one.startswith(f"{name} ")).split()[1])

    names = ("jspec_generated_tokens_total", "jspec_committed_nodes_total", "jspec_lane_rounds_total")
    before = [read(name) for name in names]
    spec = served.post("/v1/completions", prompt="two", max_tokens=9, temperature=0).json()["choices"][0][
        "spec"
    ]
    after = [read(name) for name in names]
    grown = [b - a for a, b in zip(before, after, strict=True)]
    assert grown == [spec["emitted"], spec["committed"], spec["rounds"]]
    assert read("jspec_running") == read("jspec_waiting") == 0
    assert read("jspec_compiled_programs") > 0
    assert read('jspec_free_pages{group="0"}') == served.service.engine.free_pages[0]
    assert read("jspec_time_to_first_token_seconds_count") > 0
