"""Clients that leave, queues that are full, rounds that fail: nothing hangs, and no slot stays taken."""

import dataclasses
import json
import signal
import socket
import subprocess
import sys
import traceback

import jax.numpy as jnp
import numpy as np
import openai
import pytest
from contract.engines import TABLE
from contract.engines import engine as table_engine
from contract.words import words_tokenizer
from served import BODY, LIMITS, NAME, Background, line, serving, until

from jspec.timings import Timings


def hangs_up(served, body) -> socket.socket:
    """A raw connection on which a request was sent."""
    host, port = served.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
    sock.sendall(head.encode() + data)
    return sock


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("rounds", [0, 2])
def test_client_who_leaves_frees_its_slot_within_one_round(served, braked, stream, rounds):
    thread, engine = served.service.thread, served.service.engine
    braked.engage()
    sock = hangs_up(served, BODY | {"stream": stream, "speculation": "off"})
    braked.step(rounds)
    until(lambda: thread.running == 1 or not rounds)
    assert len(engine._runner.free_slots) == engine.max_slots - 1
    before = braked.rounds
    sock.close()
    until(lambda: not thread._commands.empty())
    braked.release()
    until(lambda: thread.unfinished == 0)
    assert braked.rounds == before + 1  # the round that had begun
    assert len(engine._runner.free_slots) == engine.max_slots
    assert engine.free_pages == engine._pool.num_pages


def test_client_that_is_killed_frees_its_slot(served, braked):
    host, port = served.url.removeprefix("http://").split(":")
    data = json.dumps(BODY | {"stream": True})
    head = f"POST /v1/completions HTTP/1.1\\r\\nhost: x\\r\\ncontent-type: application/json\\r\\ncontent-length: {len(data)}"
    program = (
        f"import socket; s = socket.create_connection(({host!r}, {port})); "
        f"s.sendall(b'{head}\\r\\n\\r\\n' + {data!r}.encode())\nwhile s.recv(4096): pass"
    )
    braked.engage()
    client = subprocess.Popen([sys.executable, "-S", "-c", program])
    braked.step(2)
    client.kill()
    client.wait()
    until(lambda: not served.service.thread._commands.empty())
    braked.release()
    until(lambda: served.service.thread.unfinished == 0)
    engine = served.service.engine
    assert len(engine._runner.free_slots) == engine.max_slots
    assert engine.free_pages == engine.num_pages


def test_draft_tokens_of_an_answer_that_nobody_waits_for_are_counted_at_every_stage(served, braked):
    def stages() -> list[float]:
        registry = served.service.metrics.registry
        names = ("proposed", "verified", "accepted")
        return [registry.get_sample_value("jspec_draft_tokens_total", {"stage": n}) or 0 for n in names]

    braked.engage()
    before = stages()
    sock = hangs_up(served, BODY)
    braked.step(4)  # three of them draft
    sock.close()
    until(lambda: not served.service.thread._commands.empty())
    braked.release()
    until(lambda: served.service.thread.unfinished == 0)
    proposed, verified, accepted = (b - a for a, b in zip(before, stages(), strict=True))
    assert proposed >= verified >= accepted > 0


def test_cancelled_while_it_waits_for_a_slot(served, braked):
    thread = served.service.thread
    braked.engage()
    running = [Background(served) for _ in range(3)]
    until(lambda: thread.unfinished == 3)
    braked.step()
    sock = hangs_up(served, BODY)
    until(lambda: thread.unfinished == 4)
    sock.close()
    braked.step()
    until(lambda: thread.unfinished == 3)
    braked.release()
    assert [one.result().json()["choices"][0]["text"] for one in running] == [line(2, 40)] * 3


def test_full_queue_is_a_429_with_retry_after(served, braked):
    braked.engage()
    held = [Background(served) for _ in range(3 + LIMITS.max_waiting)]
    until(lambda: served.service.thread.unfinished == 3 + LIMITS.max_waiting)
    reply = served.post("/v1/completions", prompt="two")
    assert reply.status_code == 429
    assert 1 <= int(reply.headers["retry-after"]) <= 60
    assert reply.json()["error"]["code"] == "queue_full"
    client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0)
    with client, pytest.raises(openai.RateLimitError):
        client.completions.create(model=NAME, prompt="two", stream=True)
    braked.release()
    assert {one.result().status_code for one in held} == {200}
    assert served.post("/v1/completions", prompt="two").status_code == 200


def test_answers_of_one_call_are_taken_on_together_or_not_at_all(served, braked):
    braked.engage()
    held = [Background(served) for _ in range(LIMITS.max_waiting)]
    until(lambda: served.service.thread.unfinished == LIMITS.max_waiting)
    assert served.post("/v1/completions", prompt="two", n=4).status_code == 429
    assert served.service.thread.unfinished == LIMITS.max_waiting
    braked.release()
    assert {one.result().status_code for one in held} == {200}


def test_slow_reader_holds_no_slot(served):
    before = served.service.thread.rounds
    sock = hangs_up(served, BODY | {"stream": True})
    until(lambda: served.service.thread.rounds > before and served.service.thread.unfinished == 0)
    assert served.post("/v1/completions", prompt="two", max_tokens=3).status_code == 200
    sock.close()


@pytest.fixture(scope="module")
def other():
    """An engine for servers that tests break."""
    return table_engine("cut1", tokenizer=words_tokenizer(), max_slots=2)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
def test_answer_that_takes_too_long_is_a_504(other, stream):
    limits = dataclasses.replace(LIMITS, request_seconds=0.3)
    with serving(other, limits=limits) as one:
        one.post(
            "/v1/completions", prompt="two", max_tokens=5, temperature=0
        )  # compiles, and may take too long
        until(lambda: one.service.thread.unfinished == 0, 30)
        one.brake.engage()
        asked = Background(one, stream=stream)
        assert asked.result().status_code == 504
        assert asked.result().json()["error"]["code"] == "timeout"
        asked = Background(one, stream=stream)
        one.brake.release()
        asked.result()
        until(lambda: one.service.thread.unfinished == 0)
        assert len(other._runner.free_slots) == 2


def test_stream_that_takes_too_long_says_so_at_its_end(other):
    with serving(other) as one:
        one.post("/v1/completions", prompt="two", max_tokens=40, temperature=0)
        for seconds in (
            0.5,
            2.0,
            8.0,
            30.0,
        ):  # whose first tokens come later is a 504: the machine may be busy
            one.service.limits = dataclasses.replace(LIMITS, request_seconds=seconds)
            one.brake.engage()
            one.brake.allow(2)
            asked = Background(one, stream=True)
            status = asked.result().status_code
            if status == 200:
                break
            assert status == 504
            one.brake.release()
            until(lambda: one.service.thread.unfinished == 0)
        assert asked.result().status_code == 200
        events = asked.result().text.split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "timeout"
        assert "data: [DONE]" not in events
        one.brake.release()
        until(lambda: one.service.thread.unfinished == 0)


def test_failed_round_fails_all_and_later_ones(other):
    with serving(other) as one:
        one.brake.engage()
        held = [Background(one, stream=n == 1) for n in range(4)]
        until(lambda: one.service.thread.unfinished == 4)
        one.brake.failure = RuntimeError("planted")
        one.brake.release()
        for asked in held:
            assert asked.result().status_code == 500
            assert "RuntimeError" in asked.result().json()["error"]["message"]
        depths = set()
        for _ in range(3):
            assert one.post("/v1/completions", prompt="two").status_code == 500
            depths.add(len(list(traceback.walk_tb(one.service.thread.failure.__traceback__))))
        assert len(depths) == 1  # nothing of those who met the failure is kept
        with one.client() as client:
            assert client.get("/health").status_code == 503
            assert client.get("/health").json() == {"status": "failed"}
            assert client.get("/server_info").json()["state"] == "failed"


def test_request_whose_logits_are_nan_fails_alone(served):
    """One row of the table is no number; a request that never comes there is not touched."""
    bad = int(np.argmax(TABLE[5]))
    table = TABLE.copy()
    table[bad] = np.nan
    clean = next(token for token in range(8) if bad not in _reached(table, token))
    engine, models = served.service.engine, served.service.engine.models
    engine.models = dataclasses.replace(models, target=(jnp.asarray(table),))
    try:
        broken = Background(served, prompt=[bad])
        whole = Background(served, prompt=[clean], max_tokens=20)
        assert broken.result().status_code == 500
        assert "NaN" in broken.result().json()["error"]["message"]
        assert whole.result().json()["choices"][0]["text"] == line(clean, 20)
    finally:
        engine.models = models
    with served.client() as client:
        assert client.get("/health").status_code == 200


def _reached(table, token: int) -> set[int]:
    seen: set[int] = set()
    while token not in seen and not np.isnan(table[token]).any():
        seen.add(token)
        token = int(table[token].argmax())
    return seen | {token}


@pytest.mark.parametrize("key", ["secret", "voilà"])
def test_api_key_opens(other, key):
    with serving(other, api_key=key) as one, one.client() as client:
        reply = client.get("/v1/models", headers={"authorization": f"Bearer {key}".encode()})
        assert reply.status_code == 200


def test_api_key_is_asked_for_everywhere_but_health(other):
    with serving(other, api_key="secret") as one:
        with one.client() as client:
            assert client.get("/health").status_code == 200
            for path in ("/metrics", "/server_info", "/v1/models"):
                assert client.get(path).status_code == 401
            reply = client.post("/v1/completions", json=BODY, headers={"authorization": "Bearer secrets"})
            assert reply.status_code == 401
            assert reply.json()["error"]["code"] == "invalid_api_key"
        with openai.OpenAI(base_url=f"{one.url}/v1", api_key="secret") as client:
            assert client.completions.create(**BODY).choices[0].text == line(2, 40)


def test_sigterm_lets_answers_finish_and_takes_nothing_new(other):
    with serving(other) as one, one.client() as kept:
        kept.get("/health")
        one.brake.engage()
        asked = Background(one)
        one.brake.step()
        one.server.handle_exit(signal.SIGTERM, None)
        until(lambda: one.service.state == "draining")
        one.brake.release()
        assert asked.result().json()["choices"][0]["text"] == line(2, 40)
    assert not one.service.thread._thread.is_alive()


def test_draining_server_refuses_new_work(other):
    with serving(other) as one:
        one.service.thread.drain()
        reply = one.post("/v1/completions", prompt="two")
        assert reply.status_code == 503
        assert reply.json()["error"]["code"] == "shutting_down"
        with one.client() as client:
            assert client.get("/health").json() == {"status": "draining"}


def test_parts_of_rounds_are_measured_if_that_is_asked_for(other):
    timings = Timings()
    with serving(other, timings=timings) as one:
        one.post("/v1/completions", prompt="two", max_tokens=9, temperature=0)
        text = one.service.metrics.text().decode()
    for part in ("draft", "target", "settle", "host"):
        measured = next(
            row
            for row in text.splitlines()
            if row.startswith(f'jspec_round_part_seconds_total{{part="{part}"')
        )
        assert float(measured.split()[1]) == pytest.approx(getattr(timings, part))
        assert getattr(timings, part) > 0


def test_finished_requests_are_forgotten(served):
    for _ in range(3):
        served.post("/v1/completions", prompt="two", n=3, max_tokens=2)
    assert not served.service.thread._choices
