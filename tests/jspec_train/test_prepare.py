import json

import pytest
import tokenizers

from jspec.text.tokenizer import Tokenizer
from jspec_train.data.chat import chat_with_template
from jspec_train.data.convert import Converter, Settings
from jspec_train.prepare import prepare, samples_header
from jspec_train.samples import open_samples

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
VOCABULARY = {token: id_ for id_, token in enumerate(["?", *"abcdefghijklmnopqrstuvwxyz0123456789[]"])}


@pytest.fixture(scope="module")
def letters():
    """One token for each letter."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(VOCABULARY, [], unk_token="?"))
    return Tokenizer(backend=backend, chat_templates={}, special_tokens={}, bos_id=None, eos_ids=())


def converter(tokenizer, **settings):
    chat = chat_with_template(tokenizer, TEMPLATE, {})
    return Converter(chat, Settings(**{"max_length": 64, "vocab_size": len(VOCABULARY)} | settings))


def row(number, answer="yes"):
    question = {"role": "user", "content": f"q{number}"}
    return {"id": f"r{number}", "messages": [question, {"role": "assistant", "content": answer}]}


def write_lines(path, rows):
    path.write_text("".join(json.dumps(values) + "\n" for values in rows), "utf-8")
    return path


def run(tokenizer, data, out, validation=0.0, settings=None, **options):
    made = converter(tokenizer, **settings or {})
    header = samples_header(made, data, target=None, settings={"validation": validation})
    return prepare(data, out, made, header, validation=validation, **options)


def ids_of(source):
    return [source[index].id for index in range(len(source))]


def test_rows_become_samples_in_order(letters, tmp_path):
    data = write_lines(tmp_path / "a.jsonl", [row(1), {"messages": []} | row(2), row(3, ""), row(4)])
    sources = run(letters, data, tmp_path / "out", settings={"min_run": 6})
    assert list(sources) == ["train"]
    assert ids_of(sources["train"]) == ["r1", "r2", "r4"]
    assert sources["train"].report["rows"] == 4
    assert sources["train"].report["dropped"] == {"too few trained tokens in a row": 1}
    assert sources["train"].header.max_length == 64
    assert open_samples(tmp_path / "out").counts == sources["train"].counts


def test_rows_of_a_question_go_to_one_side_whatever_else_there_is(letters, tmp_path):
    rows = [row(number % 40, "yes" * (1 + number // 40)) for number in range(120)]
    sources = run(letters, write_lines(tmp_path / "a.jsonl", rows), tmp_path / "a", validation=0.3)
    train, held_out = set(ids_of(sources["train"])), set(ids_of(sources["validation"]))
    assert not train & held_out and len(train | held_out) == 40
    assert 4 <= len(held_out) <= 20
    assert len(sources["train"]) + len(sources["validation"]) == 120
    assert sources["train"].report["rows"] == 3 * len(train)
    assert (tmp_path / "a" / "train").is_dir() and (tmp_path / "a" / "validation").is_dir()
    fewer = run(letters, write_lines(tmp_path / "b.jsonl", rows[::-1][:60]), tmp_path / "b", validation=0.3)
    assert set(ids_of(fewer["validation"])) <= held_out
    assert set(ids_of(fewer["train"])) <= train


@pytest.mark.parametrize("validation", [0.0, 0.4])
@pytest.mark.parametrize("each_turn", [False, True])
@pytest.mark.parametrize("stop", [1, 2, 7, 19, 29])
def test_an_interrupted_preparation_goes_on_to_the_same_samples(
    letters, tmp_path, validation, each_turn, stop
):
    def talk(number):
        values = row(number, "" if number % 5 == 1 else "yes")
        return values | {"messages": values["messages"] * (1 + number % 3)}

    data = write_lines(tmp_path / "a.jsonl", [talk(number) for number in range(30)])
    settings = {"each_turn": each_turn, "min_run": 6, "max_length": 200}
    options = {"validation": validation, "settings": settings, "shard_samples": 4}
    whole = run(letters, data, tmp_path / "whole", **options)

    def interrupt(number, reports):
        if number == stop:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(letters, data, tmp_path / "out", **options, on_row=interrupt)
    with pytest.raises((ValueError, FileNotFoundError)):
        open_samples(tmp_path / "out" / "train" if validation else tmp_path / "out")
    again = run(letters, data, tmp_path / "out", **options)
    for name, source in whole.items():
        assert ids_of(again[name]) == ids_of(source)
        assert again[name].counts == source.counts
        assert again[name].report == source.report


def test_a_shard_that_ends_within_a_row_does_not_repeat_its_samples(letters, tmp_path, monkeypatch):
    import jspec_train.samples as module

    values = row(0)
    data = write_lines(tmp_path / "a.jsonl", [values | {"messages": values["messages"] * 5}])
    written = []
    encode = module.encode

    def dies_at_the_fourth(sample):
        written.append(sample.id)
        if len(written) == 4:
            raise KeyboardInterrupt
        return encode(sample)

    monkeypatch.setattr(module, "encode", dies_at_the_fourth)
    options = {"settings": {"each_turn": True, "max_length": 200}, "shard_samples": 2}
    with pytest.raises(KeyboardInterrupt):
        run(letters, data, tmp_path / "out", **options)
    monkeypatch.undo()
    assert ids_of(run(letters, data, tmp_path / "out", **options)["train"]) == [
        f"r0#{part}" for part in range(5)
    ]


def test_going_on_with_other_settings_or_data_is_refused(letters, tmp_path):
    data = write_lines(tmp_path / "a.jsonl", [row(number) for number in range(5)])

    def interrupt(number, reports):
        if number == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(letters, data, tmp_path / "out", on_row=interrupt)
    with pytest.raises(
        ValueError, match=r"expected samples with settings.min_run 2, got 1; use the settings"
    ):
        run(letters, data, tmp_path / "out", settings={"min_run": 1})
    write_lines(data, [row(number) for number in range(6)])
    with pytest.raises(ValueError, match=r"settings.data '1 files, \d+ bytes"):
        run(letters, data, tmp_path / "out")


@pytest.mark.parametrize(
    "rows, settings, message",
    [
        ([], {}, "data: expected at least one row, got none; check the file"),
        (
            [row(1)],
            {"min_run": 20},
            "got none of 1 rows; 1 were dropped: too few trained tokens in a row .*a.jsonl:1",
        ),
        ([row(1)], {"max_length": 5}, "1 were dropped: the answers lie past max_length .*; raise max_length"),
        (
            [{"messages": [{"role": "assistant", "content": "a"}]}],
            {},
            "no user message with an answer after it",
        ),
        ([{"text": "aaa"}], {}, "no answer found .* the chat template leaves every row untrained"),
        ([row(1), {"prompt": "a"}], {}, r"a.jsonl:2: expected a column .*, got \['prompt'\]"),
    ],
)
@pytest.mark.parametrize("validation", [0.0, 0.2])
def test_data_that_give_nothing_leave_nothing(letters, tmp_path, rows, settings, message, validation):
    data = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(ValueError, match=message):
        run(letters, data, tmp_path / "out", validation, settings)
    assert not list(tmp_path.glob("out/**/dataset.json"))


def test_both_sides_need_samples(letters, tmp_path):
    data = write_lines(tmp_path / "a.jsonl", [row(1)])
    with pytest.raises(
        ValueError, match=r"expected samples on both sides, got none for .*; change the share"
    ):
        run(letters, data, tmp_path / "out", validation=0.5)
    with pytest.raises(ValueError, match="validation: expected a share from 0 to less than 1, got 1"):
        run(letters, data, tmp_path / "out", validation=1)
