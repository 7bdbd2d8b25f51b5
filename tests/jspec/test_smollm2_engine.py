"""The embedded model through the public API: text, stops, streams and speculation."""

import functools
import json

import pytest

import jspec
from jspec.bench.prompts import PROMPTS
from jspec.cli import main

pytestmark = pytest.mark.optimized

REWRITE = [{"role": "user", "content": PROMPTS["rewrite"][2]}]
QUESTION = [{"role": "user", "content": PROMPTS["chat"][1]}]
SETTINGS = jspec.Settings(max_tokens=24)


@functools.cache
def plain() -> jspec.Engine:
    return jspec.load(drafter="plain", max_slots=2, max_context=512)


@functools.cache
def ngram() -> jspec.Engine:
    return jspec.with_drafter(plain(), "ngram")


def test_ngram_gives_plains_tokens_with_fewer_rounds():
    expected = plain().generate([REWRITE, QUESTION], SETTINGS)
    got = ngram().generate([REWRITE, QUESTION], SETTINGS)
    assert [r.token_ids for r in got] == [r.token_ids for r in expected]
    assert got[0].counters.mean_commit_length > 2
    assert expected[0].counters.mean_commit_length == 1


@pytest.mark.extended
def test_seeded_text_is_the_same_with_and_without_speculation_and_neighbours():
    warm = jspec.Settings(max_tokens=16, temperature=0.9, top_p=0.9, repetition_penalty=1.1, seed=11)
    alone = plain().generate([REWRITE], warm)[0]
    assert ngram().generate([QUESTION, REWRITE], [SETTINGS, warm])[1].token_ids == alone.token_ids


@pytest.mark.extended
def test_stream_adds_up_to_the_text_and_marks_what_was_drafted():
    pieces = list(ngram().stream([REWRITE], SETTINGS))
    result = ngram().generate([REWRITE], SETTINGS)[0]
    assert "".join(piece.text for piece in pieces) == result.text
    assert result.text.startswith("Dear Ms")
    assert sum(sum(piece.drafted) for piece in pieces) == result.counters.accepted > 0


@pytest.mark.extended
@pytest.mark.parametrize("engine", [plain, ngram])
def test_stop_string_inside_a_block_ends_the_text_before_it(engine):
    whole = engine().generate([REWRITE], SETTINGS)[0]
    stopped = engine().generate([REWRITE], jspec.Settings(max_tokens=24, stop=("twelve",)))[0]
    assert stopped.finish_reason == "stop"
    assert stopped.text == whole.text[: whole.text.index("twelve")]
    assert stopped.token_ids == whole.token_ids[: len(stopped.token_ids)]
    again = engine().generate([REWRITE], SETTINGS)[0]
    assert again.token_ids == whole.token_ids


@pytest.mark.extended
def test_prompts_may_be_text_messages_or_ids():
    tokenizer = plain().tokenizer
    ids = tokenizer.chat(QUESTION)
    by_ids, by_chat = plain().generate([ids, QUESTION], SETTINGS)
    assert by_ids.token_ids == by_chat.token_ids
    text = plain().generate("Once upon a time", jspec.Settings(max_tokens=4))
    assert text[0].prompt_ids == tuple(tokenizer.encode("Once upon a time"))


def test_log_probabilities_come_with_every_token():
    result = ngram().generate([REWRITE], jspec.Settings(max_tokens=12, log_probs=3))[0]
    assert [entry.token_id for entry in result.log_probs] == list(result.token_ids)
    assert all(entry.top[0] == (entry.token_id, entry.log_prob) for entry in result.log_probs)
    reference = plain().generate([REWRITE], jspec.Settings(max_tokens=12, log_probs=3))[0]
    for ours, theirs in zip(result.log_probs, reference.log_probs, strict=True):
        assert ours.log_prob == pytest.approx(theirs.log_prob, abs=2e-4)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"model": "no/such/folder"},
            FileNotFoundError,
            r"model: expected a folder, a \.gguf file or a hub id",
        ),
        (
            {"drafter": "no such drafter"},
            FileNotFoundError,
            'drafter: expected "ngram", "ngram-tree", "plain", or',
        ),
        ({"dtype": "int8"}, ValueError, "dtype: expected one of float32, bfloat16, float16, got 'int8'"),
        ({"max_context": 100_000}, ValueError, "max_context: expected"),
    ],
)
def test_bad_arguments_of_load_are_named(options, error, message):
    with pytest.raises(error, match=message):
        jspec.load(**options)


def test_command_line_writes_json_lines(capsys, tmp_path):
    rows = tmp_path / "prompts.jsonl"
    rows.write_text('{"prompt": "Say hello.", "settings": {"max_tokens": 3}}\n')
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--file", str(rows), "--json", "--max-context", "128", "--compilation-cache", ""])
    assert not exit_.value.code
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("{")]
    assert len(json.loads(line)["token_ids"]) == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate"], "prompt: expected at least one"),
        (["generate", "-p", "x", "--temperature", "-1"], "temperature: expected"),
        (["generate", "-p", "x", "--max-tokens", "0"], "max_tokens: expected"),
        (["generate", "-m", "missing.gguf", "x"], "model: expected a folder"),
        (["generate", "missing.gguf", "-p", "x"], "prompt: expected text, got the model 'missing.gguf'"),
        (["generate", "some/model", "-p", "x"], "prompt: expected text, got the model 'some/model'"),
        (["generate", "--file", "gone.jsonl"], "file: expected JSON Lines, got 'gone.jsonl'"),
        (["bench", "--prompts", "gone.jsonl"], "prompts: expected JSON Lines, got 'gone.jsonl'"),
        (["bench", "--json", "gone/out.json"], "json: expected a file in a folder that exists"),
        (["bench", "--task", "opera"], "task: expected some of chat"),
    ],
)
def test_command_line_errors_are_one_line(capsys, arguments, message):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
