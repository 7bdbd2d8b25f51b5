"""Bodies made from the served OpenAPI, and ones that are barely JSON: right status codes, every slot returned.

`--random-bodies 10000` sends as many of the former; they are made by schemathesis, which knows the fields'
limits.
"""

import collections
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from served import NAME, until

PATHS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/tokenize", "/detokenize")
REFUSED = {400, 404, 408, 413, 415, 422}
GOOD = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "two"}], "max_tokens": 3},
    "/v1/completions": {"prompt": "two", "max_tokens": 3},
    "/v1/responses": {"input": "two", "max_output_tokens": 3},
    "/tokenize": {"prompt": "two"},
    "/detokenize": {"tokens": [1, 2]},
}


def check_idle(served, engines) -> None:
    engine = engines["oracle"]
    until(lambda: served.service.thread.unfinished == 0)
    assert sorted(engine._runner.free_slots) == list(range(engine.max_slots))
    assert engine.free_pages == engine.num_pages
    assert not served.service.thread._choices
    with served.client() as client:
        assert client.get("/health").status_code == 200


def check_reply(reply, sent) -> None:
    assert reply.status_code == 200 or reply.status_code in REFUSED, (reply.status_code, reply.text, sent)
    if reply.status_code != 200:
        error = reply.json()["error"]
        assert error["message"] and set(error) == {"message", "type", "param", "code"}
    elif reply.headers["content-type"].startswith("text/event-stream"):
        assert reply.text.endswith("\n\n")
        assert '"error"' not in reply.text
    else:
        reply.json()


@pytest.mark.parametrize("path", PATHS)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_bytes_that_are_barely_json(served, engines, path, data):
    """A good body with bytes changed, dropped and added, UTF-8 that is none among them."""
    raw = bytearray(json.dumps({"model": NAME, **GOOD[path]}).encode())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(raw)))
        new = data.draw(
            st.binary(max_size=3)
            | st.sampled_from([b"\xed\xa0\x80", b"\\ud800", b"\\u0000", b"\xf0\x9f\x98", b'"'])
        )
        raw[at : at + data.draw(st.integers(0, 2))] = new
    with served.client() as client:
        reply = client.post(path, content=bytes(raw), headers={"content-type": "application/json"})
    check_reply(reply, bytes(raw))
    check_idle(served, engines)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=30))
def test_any_text_is_a_prompt_or_is_refused(served, engines, text):
    for path, body in (
        ("/v1/completions", {"prompt": text, "max_tokens": 2, "stop": text or None, "user": text}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": text}], "max_tokens": 2}),
        ("/v1/responses", {"input": text, "instructions": text, "max_output_tokens": 2}),
        ("/tokenize", {"prompt": text}),
    ):
        check_reply(served.post(path, **body), body)
    check_idle(served, engines)


@pytest.mark.extended
@pytest.mark.parametrize("path", PATHS)
def test_bodies_made_from_the_openapi(served, engines, path, request):
    schemathesis = pytest.importorskip("schemathesis", reason="pip install 'jspec[dev]'")
    count = request.config.getoption("--random-bodies") // len(PATHS)
    operation = schemathesis.openapi.from_url(f"{served.url}/openapi.json")[path]["POST"]
    modes = schemathesis.GenerationMode
    cases = operation.as_strategy(generation_mode=modes.POSITIVE) | operation.as_strategy(
        generation_mode=modes.NEGATIVE
    )
    answers = collections.Counter[int]()

    @settings(max_examples=count, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=cases, right_model=st.integers(0, 9))
    def send(case, right_model):
        body = case.body
        if isinstance(body, dict) and right_model:
            body["model"] = NAME
        try:
            raw = json.dumps(body).encode()
        except TypeError:  # not given, or no JSON at all
            raw = str(body).encode(errors="surrogatepass")
        with served.client() as client:
            reply = client.post(path, content=raw, headers={"content-type": "application/json"})
        answers[reply.status_code] += 1
        check_reply(reply, raw[:2000])

    programs = sum(engines["oracle"].programs.traces.values())
    send()
    print(path, dict(answers))
    assert answers.total() >= count
    assert sum(engines["oracle"].programs.traces.values()) == programs
    check_idle(served, engines)
