"""Whatever is sent, and whoever leaves: right status codes, every slot returned, every answer its solo run."""

import asyncio
import random

import httpx2
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import NAME, until

from jspec.settings import Settings
from jspec_serve.api.chat import ChatRequest
from jspec_serve.api.completions import CompletionRequest
from jspec_serve.api.responses import ResponsesRequest

BODIES = {
    "/v1/chat/completions": (
        ChatRequest,
        {"messages": [{"role": "user", "content": "two"}], "max_tokens": 3},
    ),
    "/v1/completions": (CompletionRequest, {"prompt": "two", "max_tokens": 3}),
    "/v1/responses": (ResponsesRequest, {"input": "two", "max_output_tokens": 3}),
}
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
LIKELY = st.sampled_from(
    [0, 1, 2, 0.5, True, "auto", "off", "two", ["two"], [1, 2], [[1]], {"type": "text"}, {"1": 2}]
)


@pytest.mark.parametrize("path", BODIES)
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_body_breaks_the_server(served, path, data):
    model, good = BODIES[path]
    names = data.draw(st.lists(st.sampled_from(sorted(model.model_fields)) | st.text(max_size=8), max_size=4))
    body = {"model": NAME, **good, **{name: data.draw(LIKELY | JSON) for name in names}}
    with served.client() as client:
        reply = client.post(path, json=body)
    assert reply.status_code in (200, 400, 404), reply.text
    if reply.status_code != 200:
        assert reply.json()["error"]["message"]
    until(lambda: served.service.thread.unfinished == 0)


COUNT, TOGETHER = 120, 8


def asked(number: int) -> dict:
    """A request of random length and settings."""
    rng = random.Random(number)
    body = {
        "prompt": [rng.randrange(8) for _ in range(rng.randint(1, 20))],
        "max_tokens": rng.randint(1, 30),
        "temperature": rng.choice([0, 0.7, 1.3]),
        "seed": number,
        "speculation": rng.choice(["on", "off", {"draft_length": 2}]),
    }
    for name, value in {
        "top_k": 4,
        "top_p": 0.8,
        "min_p": 0.1,
        "presence_penalty": 0.5,
        "stop_token_ids": [3],
    }.items():
        if rng.random() < 0.3:
            body[name] = value
    return body


def own_settings(body: dict) -> Settings:
    values = {name: value for name, value in body.items() if name not in ("prompt", "speculation")}
    return Settings(**values | {"temperature": float(values["temperature"])})


def test_many_random_requests_and_clients_that_leave(served, engines):
    engine, thread = engines["oracle"], served.service.thread
    programs = sum(engine.programs.traces.values())
    replies: dict[int, dict] = {}

    async def ask(client: httpx2.AsyncClient, number: int) -> None:
        body = {"model": NAME, **asked(number)}
        if number % 5 == 0:  # leaves after its first tokens, or before them
            async with client.stream("POST", "/v1/completions", json=body | {"stream": True}) as reply:
                if number % 2:
                    await anext(reply.aiter_raw())
            return
        reply = await client.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        replies[number] = reply.json()["choices"][0]

    async def work() -> None:
        numbers = iter(range(COUNT))
        async with (
            httpx2.AsyncClient(base_url=served.url, timeout=60) as client,
            asyncio.TaskGroup() as group,
        ):
            for _ in range(TOGETHER):
                group.create_task(_all(client, numbers))

    async def _all(client, numbers) -> None:
        for number in numbers:
            await ask(client, number)

    asyncio.run(work())
    until(lambda: thread.unfinished == 0)
    assert sum(engine.programs.traces.values()) == programs
    assert sorted(engine._runner.free_slots) == list(range(engine.max_slots))
    assert engine.free_pages == engine._pool.num_pages
    assert not thread._choices
    numbers = sorted(replies)
    bodies = [asked(number) for number in numbers]
    own = engine.generate([body["prompt"] for body in bodies], [own_settings(body) for body in bodies])
    for number, result in zip(numbers, own, strict=True):
        assert replies[number]["text"] == result.text, asked(number)
        assert replies[number]["finish_reason"] == result.finish_reason
