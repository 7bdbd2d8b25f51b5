"""`jspec generate` on a table of 8 words: what is read, what is printed, what is refused."""

import json

import pytest
from contract.engines import TABLE, engine
from contract.words import WORDS, words_tokenizer

from jspec.cli import main
from jspec.commands import generate as command
from jspec.commands.prompt_files import read_rows
from jspec.settings import Settings


def line(token: int, count: int) -> str:
    """The table's greedy line as text."""
    said = []
    for _ in range(count):
        token = int(TABLE[token].argmax())
        said.append(WORDS[token])
    return " ".join(said)


@pytest.fixture(scope="module")
def words():
    return engine("ngram", tokenizer=words_tokenizer())


@pytest.fixture
def run(words, monkeypatch, capsys, unchecked):
    """Runs the command line; returns exit code, standard output and standard error."""
    asked = []

    def load(model, **options):
        asked.append(model)
        return words

    monkeypatch.setattr(command, "load", load)

    def run_(*arguments):
        with pytest.raises(SystemExit) as exit_:
            main(["generate", *map(str, arguments)])
        return exit_.value.code or 0, *capsys.readouterr()

    run_.asked = asked
    return run_


def test_text_alone_is_a_prompt_for_the_default_model(run):
    assert run("two three", "--max-tokens", 5)[:2] == (0, line(7, 5) + "\n")  # a chat ends with "seven"
    assert run("two three", "--no-chat", "--max-tokens", 5)[:2] == (0, line(3, 5) + "\n")
    assert run("-m", "some/model", "-p", "two three", "--max-tokens", 5)[:2] == (0, line(7, 5) + "\n")
    assert run.asked == [None, None, "some/model"]


def test_answers_to_several_prompts_say_to_which(run, tmp_path):
    rows = tmp_path / "rows.jsonl"
    chat = [{"role": "user", "content": [{"type": "text", "text": "two "}, {"type": "text", "text": "six"}]}]
    rows.write_text(
        json.dumps({"ids": [1, 2], "settings": {"max_tokens": 2}})
        + "\n\n"
        + json.dumps({"messages": chat, "task": "any"})
    )
    code, out, _ = run("five\n  four", "--file", rows, "--max-tokens", 3)
    assert code == 0
    assert out == (
        f"> prompt 1: five four\n{line(7, 3)}\n\n"
        f"> {rows}:1: ids [1, 2]\n{line(2, 2)}\n\n"
        f"> {rows}:3: two six\n{line(7, 3)}\n\n"
    )


def test_long_prompts_are_named_by_their_beginning(run):
    out = run("one " * 40, "two", "--max-tokens", 1, "--max-slots", 1)[1]
    assert max(map(len, out.splitlines())) < 100
    assert out.startswith("> prompt 1: one one")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "x", "settings": {"max_token": 1}}', ":1: settings: expected names out of max_tokens,"),
        ('{"prompt": "x", "settings": {"top_p": 2}}', ":1: top_p: expected a number in (0, 1], got 2"),
        (
            '{"prompt": "x", "settings": {"logit_bias": {"a": 1}}}',
            ":1: logit_bias: expected token ids as keys, got 'a'",
        ),
        (
            '{"prompt": "x", "settings": {"stop_token_ids": [9]}}',
            ":1: stop_token_ids: expected ids below the",
        ),
        ('{"prompt": "x"}\n{"prompt": "x", "settings": 5}', ":2: settings: expected an object, got 5"),
        ('{"promt": "x"}', ':1: expected one of "prompt", "messages", "ids", got "promt"; '),
        ("{}", ':1: expected one of "prompt", "messages", "ids", got no key; '),
        (
            '{"prompt": "x", "ids": [1]}',
            ':1: expected one of "prompt", "messages", "ids", got "prompt", "ids"; ',
        ),
        (
            '{"prompt": "x", "setting": {}}',
            ':1: expected no keys but "prompt", "settings" and "task", got "setting"; ',
        ),
        ('{"prompt": 3}', ":1: prompt: expected text, got 3"),
        ('{"prompt": null}', ":1: prompt: expected text, got null"),
        ('{"ids": "x"}', ':1: ids: expected a list of token ids, got "x"'),
        ('{"ids": [1.5]}', ":1: ids[0]: expected a token id or a chat message, got 1.5"),
        ('{"ids": []}', ":1: expected at least one token, got an empty prompt"),
        ('{"ids": [1, 9]}', ":1: expected ids below 8, got 9"),
        ('{"messages": "x"}', ':1: messages: expected a list of chat messages, got "x"'),
        ('{"messages": [{"role": "user"}]}', ':1: messages[0]["content"]: expected a string, got none'),
        ('{"messages": [{"content": "x"}]}', ':1: messages[0]["role"]: expected a string, got none'),
        ("[1]", ":1: expected an object, got '[1]'"),
        ('{"prompt": "x"', ":1: expected one JSON object, got"),
        ("", "file: expected at least one prompt, got none in"),
    ],
)
def test_a_bad_line_is_named_and_nothing_is_printed(run, tmp_path, text, message):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(text)
    code, out, error = run("--file", rows)
    assert (code, out) == (2, "")
    assert message in error
    assert len(error.splitlines()) == 1


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, reason in (
        ("gone", "No such file"),
        ("", "Is a directory"),
        ("binary", "it is not UTF-8 text"),
    ):
        with pytest.raises(ValueError, match=rf"^file: expected JSON Lines, got '.*' \({reason}"):
            read_rows(tmp_path / name, Settings())


def test_a_request_that_fails_says_so_and_so_does_the_exit_code(monkeypatch, capsys):
    broken = TABLE.copy()
    broken[6] = float("nan")
    monkeypatch.setattr(
        command, "load", lambda *_, **__: engine("plain", broken, tokenizer=words_tokenizer())
    )
    for prompts in (("six",), ("one", "six")):
        with pytest.raises(SystemExit) as exit_:
            main(["generate", "--no-chat", "--max-tokens", "1", *prompts])
        assert exit_.value.code == 1
        assert f"prompt {len(prompts)}: error: the target's logits are NaN" in capsys.readouterr().err
