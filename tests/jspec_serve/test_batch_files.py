"""`jspec batch` on a table of 8 words."""

import json

import pytest
from served import NAME, line

from jspec.cli import main
from jspec_serve.commands import batch as command


def row(custom_id: str, **body) -> dict:
    body = {"model": NAME, "prompt": "two", "max_tokens": 4, "temperature": 0, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


@pytest.fixture
def run(engines, monkeypatch, tmp_path, capsys):
    """Writes rows, runs the command; returns exit code, answers by custom_id and standard error."""
    loads = []

    def load(*_, **options):
        loads.append(options)
        return engines["oracle"]

    monkeypatch.setattr(command, "load", load)

    def run_(*rows):
        requests, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
        requests.write_text("".join(one if isinstance(one, str) else json.dumps(one) + "\n" for one in rows))
        with pytest.raises(SystemExit) as exit_:
            main(["batch", str(requests), str(output), "--name", NAME])
        code = exit_.value.code or 0
        written = output.read_text().splitlines() if code < 2 else []
        answers = [json.loads(line) for line in written]
        assert len({one["custom_id"] for one in answers}) == len(answers)
        return code, {one["custom_id"]: one["response"] for one in answers}, capsys.readouterr()

    run_.output, run_.loads = tmp_path / "out.jsonl", loads
    return run_


def test_every_request_is_answered(run):
    chat = {
        "model": NAME,
        "messages": [{"role": "user", "content": "two"}],
        "max_tokens": 3,
        "temperature": 0,
    }
    code, answers, _ = run(
        *(row(str(n), prompt=[n], seed=n) for n in range(8)),
        {"custom_id": "chat", "method": "POST", "url": "/v1/chat/completions", "body": chat},
    )
    assert code == 0
    for n in range(8):
        assert answers[str(n)]["status_code"] == 200
        assert answers[str(n)]["body"]["choices"][0]["text"] == line(n, 4)
    assert answers["chat"]["body"]["choices"][0]["message"]["content"] == line(7, 3)


def test_bad_requests_are_answers_too(run):
    code, answers, said = run(row("good"), row("bad", colour=1), row("stream", stream=True))
    assert code == 1
    assert [answers[name]["status_code"] for name in ("good", "bad", "stream")] == [200, 400, 400]
    assert answers["bad"]["body"]["error"]["param"] == "colour"
    assert "2 of 3 requests failed" in said.err


def test_rows_of_many_answers_find_slots_and_room_in_the_queue(run, monkeypatch):
    monkeypatch.setattr(command, "MAX_CHOICES", 8)
    code, answers, _ = run(*(row(str(n), prompt=[n], n=8, max_tokens=1) for n in range(6)))
    assert code == 0
    assert {len(one["body"]["choices"]) for one in answers.values()} == {8}
    assert [options["max_slots"] for options in run.loads] == [8]  # more than there are rows


def test_what_is_answered_is_not_asked_again(run):
    run(row("a"), row("b"))
    whole = run.output.read_text()
    first, second = whole.splitlines(keepends=True)
    again = json.loads(second) | {"custom_id": "c"}
    again["response"]["status_code"] = 500
    run.output.write_text(
        first + json.dumps(again) + "\n" + second[: len(second) // 2]
    )  # killed while it wrote
    name = json.loads(first)["custom_id"]
    code, answers, _ = run(row("a"), row("b"), row("c"))
    assert code == 0
    assert set(answers) == {"a", "b", "c"}
    assert answers["c"]["status_code"] == 200
    assert answers[name] == json.loads(first)["response"]
    assert len(run.loads) == 2
    run(row("a"), row("b"), row("c"))
    assert len(run.loads) == 2  # nothing is left: no model is loaded


@pytest.mark.parametrize("foreign", ['{"custom_id": "a", "method": "POST"}\n', "a line that has no end"])
def test_output_that_holds_something_else_is_left_alone(run, foreign):
    run.output.write_text(foreign)
    code, _, said = run(row("a"))
    assert code == 2
    assert ":1: expected an answer of jspec batch, got" in said.err
    assert run.output.read_text() == foreign
    assert not run.loads


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (["{\n"], ":1: expected one JSON object a line"),
        (["\n", '["a"]\n'], ":2: expected an object of body, custom_id, method, url, got list"),
        ([row("a"), row("a")], ":2: expected a custom_id of its own, got 'a' again"),
        ([row("a") | {"url": "/v1/files"}], ":1: url: expected POST to one of"),
        ([row("a", model="other")], f"a: expected model '{NAME}', got 'other'"),
    ],
)
def test_files_that_are_no_batch_are_refused_before_anything_is_loaded(run, rows, said):
    code, _, printed = run(*rows)
    assert code == 2
    assert said in printed.err
    assert not run.loads
