import json
import random

import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jspec import Settings
from jspec.decode import Method, Models
from jspec.drafters.plain import plain
from jspec.engine import Engine
from jspec.targets.table import TableTarget
from jspec.text.tokenizer import Tokenizer
from jspec_train.regenerate import Tally, errors_file, provenance_file, regenerate, row_seed

WORDS = ("<end>", "a", "b", "c", "d", "e", "f", "<unknown>")
TABLE = np.random.default_rng(3).normal(size=(8, 8)).astype(np.float32) * 1.5
GREEDY, DRAWN = Settings(max_tokens=6), Settings(max_tokens=6, temperature=1.0, seed=5)


def tokenizer():
    model = tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unknown>")
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(
        backend=backend,
        chat_templates={"default": "{% for m in messages %}{{ m['content'] }} {% endfor %}"},
        special_tokens={},
        bos_id=None,
        eos_ids=(0,),
    )


def engine(table=TABLE, **options):
    return Engine(
        method=Method(target=TableTarget(vocab_size=8), drafter=plain()),
        models=Models(target=(jnp.asarray(table),), drafter=()),
        tokenizer=tokenizer(),
        eos_ids=(0,),
        **{**dict(max_slots=2, max_context=24, page_size=4, chunks=(7,)), **options},
    )


@pytest.fixture(scope="module")
def shared():
    return engine()


def ask(*words, **columns):
    return {"messages": [{"role": "user", "content": " ".join(words)}], **columns}


ROWS = [ask(*text, id=f"r{n}") for n, text in enumerate(("ab", "c", "defa", "f", "bbc", "edcb", "aaa", "fe"))]


def write(path, rows):
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(path):
    return {row["id"]: (row["conversations"][-1]["content"], row["finish_reason"]) for row in read(path)}


def greedy_line(token, steps=6):
    words = []
    for _ in range(steps):
        token = int(TABLE[token].argmax())
        if token == 0:
            return " ".join(words), "stop"
        words.append(WORDS[token])
    return " ".join(words), "length"


def test_every_row_gets_the_targets_own_answer(shared, tmp_path):
    source = write(tmp_path / "in.jsonl", [dict(row, task="chat", extra=[1]) for row in ROWS])
    seen = []

    tally = regenerate(shared, source, tmp_path / "out.jsonl", GREEDY, on_progress=seen.append)

    rows = read(tmp_path / "out.jsonl")
    assert answers(tmp_path / "out.jsonl") == {
        row["id"]: greedy_line(WORDS.index(row["messages"][-1]["content"][-1])) for row in ROWS
    }
    assert {row["task"] for row in rows} == {"chat"} and rows[0]["extra"] == [1]
    assert all("messages" not in row and row["conversations"][0]["role"] == "user" for row in rows)
    cut = sum(reason == "length" for _, reason in answers(tmp_path / "out.jsonl").values())
    assert tally == Tally(rows=8, answered=8, tokens=tally.tokens, cut=cut, reused=tally.reused)
    assert [one.answered for one in seen] == list(range(1, 9))
    assert not errors_file(tmp_path / "out.jsonl").read_text()


def test_answers_depend_on_the_row_and_the_seed_alone(shared, tmp_path):
    turned = list(ROWS)
    random.Random(0).shuffle(turned)
    regenerate(shared, write(tmp_path / "a.in", ROWS), tmp_path / "a.jsonl", DRAWN)
    regenerate(engine(max_slots=1), write(tmp_path / "b.in", turned), tmp_path / "b.jsonl", DRAWN)
    other = Settings(max_tokens=6, temperature=1.0, seed=6)
    regenerate(shared, tmp_path / "a.in", tmp_path / "d.jsonl", other)

    expected = answers(tmp_path / "a.jsonl")
    assert answers(tmp_path / "b.jsonl") == expected
    assert answers(tmp_path / "d.jsonl") != expected
    assert expected != {
        row["id"]: greedy_line(WORDS.index(row["messages"][-1]["content"][-1])) for row in ROWS
    }
    assert len({row_seed(f"r{n}", seed) for n in range(8) for seed in (5, 6)}) == 16


def test_a_run_that_was_stopped_goes_on_where_it_was(shared, tmp_path):
    source, out = write(tmp_path / "in.jsonl", ROWS), tmp_path / "out.jsonl"
    regenerate(shared, source, tmp_path / "whole.jsonl", DRAWN)

    def stop(tally):
        if tally.answered == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        regenerate(shared, source, out, DRAWN, on_progress=stop)
    assert len(read(out)) == 3
    with out.open("a") as file:
        file.write('{"id": "r7", "conversations": [{"role": "us')  # killed while writing

    tally = regenerate(shared, source, out, DRAWN)

    assert (tally.answered, tally.skipped, tally.failed) == (5, 3, 0)
    assert answers(out) == answers(tmp_path / "whole.jsonl")
    assert len(read(out)) == 8
    again = regenerate(shared, source, out, DRAWN)
    assert (again.answered, again.skipped) == (0, 8)


def test_rows_that_cannot_be_answered_are_listed_and_counted(shared, tmp_path):
    rows = [
        ROWS[0],
        "{broken",
        {"id": "x1", "text": "a b"},
        ask(*"abcdefabcdefabcdefa", id="x2"),
        ROWS[0],
        {"id": "x3", "messages": [{"role": "assistant", "content": "a"}]},
        {"id": "x4", "messages": [{"role": "user", "content": None}]},
        "[1]",
        ROWS[1],
    ]

    tally = regenerate(shared, write(tmp_path / "in.jsonl", rows), tmp_path / "out.jsonl", GREEDY)

    assert (tally.rows, tally.answered, tally.failed, tally.skipped) == (9, 2, 7, 0)
    failed = read(errors_file(tmp_path / "out.jsonl"))
    assert [(row["line"], row["id"]) for row in failed] == [
        (2, None),
        (3, "x1"),
        (4, "x2"),
        (5, "r0"),
        (6, "x3"),
        (7, "x4"),
        (8, None),
    ]
    for row, reason in zip(
        failed,
        (
            "line: expected a JSON object",
            'row: expected "messages" or "conversations"',
            "messages: expected at most 18 tokens beside an answer of 6, got 19",
            "id: expected one row each, got 'r0' in line 1, too",
            "messages: expected a user message at the end",
            "messages: expected role and content",
            "line: expected a JSON object",
        ),
        strict=True,
    ):
        assert row["error"].startswith(reason), row


def test_an_answer_that_breaks_is_an_error_of_its_row(tmp_path):
    table = TABLE.copy()
    table[2] = np.nan
    out = tmp_path / "out.jsonl"
    tally = regenerate(
        engine(table=table), write(tmp_path / "in.jsonl", [ask("b", id="bad"), ROWS[3]]), out, GREEDY
    )
    assert tally.failed >= 1
    assert read(errors_file(out))[0]["id"] == "bad"
    assert "NaN" in read(errors_file(out))[0]["error"]
    assert tally.answered + tally.failed == 2


def test_earlier_turns_stay_and_the_last_answer_is_replaced(shared, tmp_path):
    turns = [("human", "a b"), ("gpt", "made up"), ("human", "c"), ("gpt", "by another model")]
    row = {"conversations": [{"from": role, "value": text} for role, text in turns]}
    regenerate(shared, write(tmp_path / "in.jsonl", [row]), tmp_path / "out.jsonl", GREEDY)
    (got,) = read(tmp_path / "out.jsonl")
    assert [(m["role"], m["content"]) for m in got["conversations"]] == [
        ("user", "a b"),
        ("assistant", "made up"),
        ("user", "c"),
        ("assistant", greedy_line(WORDS.index("c"))[0]),
    ]
    assert len(got["id"]) == 16


def test_answers_of_other_settings_or_another_origin_are_not_mixed(shared, tmp_path):
    source, out = write(tmp_path / "in.jsonl", ROWS[:2]), tmp_path / "out.jsonl"
    regenerate(shared, source, out, GREEDY)
    with pytest.raises(ValueError, match=r"out: expected answers made with settings \{'max_tokens': 7"):
        regenerate(shared, source, out, Settings(max_tokens=7))
    provenance_file(out).unlink()
    with pytest.raises(
        ValueError, match=r"out: expected a new file or one with out\.regeneration\.json beside it"
    ):
        regenerate(shared, source, out, GREEDY)


def test_an_engine_without_a_tokenizer_is_refused(tmp_path):
    bare = engine()
    bare.tokenizer = None
    with pytest.raises(ValueError, match="engine: expected one with a tokenizer"):
        regenerate(bare, tmp_path / "in.jsonl", tmp_path / "out.jsonl", GREEDY)
