"""`jspec serve`: what it makes of its options, and that it is warm before it says that it is ready."""

import json
import logging

import pytest

from jspec.buckets import MIXED_CHUNKS
from jspec.cli import main
from jspec_serve.commands import serve as command
from jspec_serve.logs import JsonLines
from jspec_serve.server import Listen, bound_socket


@pytest.fixture
def run(engines, monkeypatch, capsys):
    """Runs the command up to where it would serve; returns its exit code, the server and standard error."""
    servers, warm, loaded = [], [], {}

    class Server:
        def __init__(self, service, *, listen, api_key):
            self.service, self.listen, self.api_key = service, listen, api_key

        def run(self, *, sockets):
            assert warm.pop() == engines["oracle"]
            servers.append(self)
            sockets[0].close()

    monkeypatch.setattr(command, "load", lambda *_, **options: loaded.update(options) or engines["oracle"])
    monkeypatch.setattr(command, "warm_up", warm.append)
    monkeypatch.setattr(command, "DrainingServer", Server)
    monkeypatch.setattr(command, "log_json", lambda _: None)
    monkeypatch.delenv("JSPEC_API_KEY", raising=False)

    def run_(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(["serve", *map(str, arguments)])
        return exit_.value.code or 0, servers[-1] if servers else None, capsys.readouterr().err

    run_.loaded = loaded
    return run_


def test_server_is_warm_and_named(run, tmp_path):
    key = tmp_path / "key"
    key.write_text("secret\n")
    code, server, _ = run(
        *("--target", "some/Model.gguf", "--port", 8765, "--max-waiting", 3, "--api-key-file", key, "--parts")
    )
    assert code == 0
    assert (server.service.name, server.api_key, server.listen.url) == (
        "Model",
        "secret",
        "http://127.0.0.1:8765",
    )
    assert server.service.limits.max_waiting == 3


def test_when_grammars_are_worked_on_is_an_option(run):
    for options, mode in [
        (["--grammar-overlap", "none"], "none"),
        (["--grammar-overlap", "two"], "two"),
        ([], "one"),
        (["--no-overlap"], "two"),
    ]:
        assert run("--port", 8766, *options)[0] == 0
        assert run.loaded["grammar_overlap"] == mode


def test_running_requests_decode_beside_prompts_unless_that_is_turned_off(run):
    for options, chunks in [
        ([], MIXED_CHUNKS),
        (["--max-slots", 2, "--mixed-prefill"], MIXED_CHUNKS),
        (["--no-mixed-prefill"], ()),
        (["--max-slots", 1], ()),
    ]:
        assert run("--port", 8767, *options)[0] == 0
        assert run.loaded["mixed_chunks"] == chunks


def test_warm_engine_has_every_program_that_requests_need(engines):
    command.warm_up(engines["oracle"])
    warmed = {bucket for kind, bucket in engines["oracle"].programs.traces if kind == "execute"}
    assert {bucket.chunk for bucket in warmed} == {0, 3, 7}
    decoding = {(bucket.lanes, bucket.nodes) for bucket in warmed if not bucket.chunk}
    assert decoding == {(1, 1), (1, 4), (2, 2), (2, 8), (3, 3), (3, 12)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--tls-key", "key.pem"], "tls_certificate: expected it together with tls_key"),
        (["--log-level", "loud"], "log_level: expected debug, info, warning or error, got 'loud'"),
        (["--api-key-file", "/dev/null"], "api_key: expected at least one character in /dev/null"),
        (["--request-seconds", 0], "request_seconds: expected at least"),
        (["--no-overlap", "--grammar-overlap", "one"], 'grammar_overlap: expected "none" or "two"'),
    ],
)
def test_wrong_options_are_refused_before_the_model_is_loaded(run, arguments, said):
    code, server, error = run(*arguments)
    assert code == 2
    assert said in error
    assert server is None


def test_address_in_use_is_told_before_the_model_is_loaded(run):
    with bound_socket(Listen(port=0)) as taken:
        taken.listen()
        code, server, error = run("--port", taken.getsockname()[1])
    assert code == 2
    assert "Address already in use" in error
    assert server is None


def test_logs_are_json_with_their_fields():
    record = logging.LogRecord("name", logging.INFO, "", 0, "said %s", ("this",), None)
    record.fields = {"request_id": "1", "path": "/é"}
    line = json.loads(JsonLines().format(record))
    assert (line["message"], line["level"], line["request_id"], line["path"]) == (
        "said this",
        "info",
        "1",
        "/é",
    )
