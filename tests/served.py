"""Servers on a table of 8 words behind a real socket, and a brake for their engine."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import httpx2
import uvicorn
from contract.engines import TABLE
from contract.words import WORDS

from jspec.engine import Engine
from jspec.timings import Timings
from jspec_serve.limits import Limits
from jspec_serve.server import DrainingServer, Listen, bound_socket
from jspec_serve.service import Service

NAME = "table"
LIMITS = Limits(max_waiting=6, max_body_bytes=20_000, max_choices=4, request_seconds=60.0, body_seconds=5.0)

BODY = {"model": NAME, "prompt": "two", "max_tokens": 40, "temperature": 0}


def line(token: int, count: int) -> str:
    """The table's greedy text behind a token."""
    said = []
    for _ in range(count):
        token = int(TABLE[token].argmax())
        said.append(WORDS[token])
    return " ".join(said)


class Brake:
    """Stops an engine before its rounds, so that a test can look at it in between."""

    def __init__(self, engine: Engine):
        self._runner, self._launch = engine._runner, engine._runner.launch
        self._changed = threading.Condition()
        self._allowed = 0
        self.engaged = self.blocked = False
        self.rounds = 0  # that have run
        self.failure: Exception | None = None
        self._runner.launch = self._braked  # type: ignore[method-assign]

    def _braked(self, *args, **kwargs):
        with self._changed:
            self.blocked = self.engaged
            self._changed.wait_for(lambda: not self.engaged or self._allowed)
            self._allowed = max(self._allowed - 1, 0)
            self.blocked = False
        if self.failure is not None:
            raise self.failure
        self.rounds += 1
        return self._launch(*args, **kwargs)

    def engage(self) -> None:
        self.engaged = True

    def step(self, count: int = 1) -> None:
        """Lets so many rounds run, and waits until they have."""
        for _ in range(count):
            until(lambda: self.blocked)
            with self._changed:
                self.blocked, self._allowed = False, 1
                self._changed.notify()
        until(lambda: self.blocked)

    def allow(self, count: int) -> None:
        """Lets so many rounds run whenever there are some; waits for none."""
        with self._changed:
            self._allowed = count
            self._changed.notify()

    def release(self) -> None:
        with self._changed:
            self.engaged, self._allowed = False, 0
            self._changed.notify()


@dataclasses.dataclass(kw_only=True)
class Served:
    """A running server."""

    service: Service
    url: str
    server: uvicorn.Server
    brake: Brake

    def client(self, **options) -> httpx2.Client:
        return httpx2.Client(base_url=self.url, timeout=60, **options)

    def post(self, path: str, **body) -> httpx2.Response:
        with self.client() as client:
            return client.post(path, json={"model": NAME, **body})


class Background:
    """A request in a thread of its own."""

    def __init__(self, served, **body):
        self.response: httpx2.Response | None = None
        self._client = served.client()
        self._thread = threading.Thread(target=self._ask, args=(BODY | body,))
        self._thread.start()

    def _ask(self, body):
        self.response = self._client.post("/v1/completions", json=body)

    def result(self) -> httpx2.Response:
        self._thread.join(60)
        self._client.close()
        assert self.response is not None
        return self.response


@contextlib.contextmanager
def serving(
    engine: Engine,
    *,
    limits: Limits = LIMITS,
    api_key: str | None = None,
    timings: Timings | None = None,
    tls: tuple[str, str] | None = None,
) -> Iterator[Served]:
    service = Service(engine, name=NAME, limits=limits, timings=timings)
    brake = Brake(engine)
    certificate, key = tls or (None, None)
    listen = Listen(port=0, tls_certificate=certificate, tls_key=key)
    sock = bound_socket(listen)
    server = DrainingServer(service, listen=listen, api_key=api_key)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
    thread.start()
    while not server.started:
        assert thread.is_alive()
        threading.Event().wait(0.01)
    try:
        yield Served(
            service=service,
            url=dataclasses.replace(listen, port=sock.getsockname()[1]).url,
            server=server,
            brake=brake,
        )
    finally:
        brake.release()
        server.should_exit = True
        thread.join(30)
        engine._runner.launch = brake._launch
        assert not thread.is_alive()


def until(condition, seconds: float = 30.0) -> None:
    """Waits for what another thread brings about."""
    event = threading.Event()
    for _ in range(int(seconds / 0.005)):
        if condition():
            return
        event.wait(0.005)
    raise AssertionError("it did not happen in time")
