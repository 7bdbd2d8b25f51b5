import json

import pyarrow
import pyarrow.parquet
import pytest

from jspec_train.data import rows as module
from jspec_train.data.rows import count_rows, data_files, read_rows

ROWS = [{"text": "a"}, {"text": "b\n"}, {"messages": [{"role": "user", "content": "ç"}]}]


def write_lines(path, rows=ROWS):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), "utf-8")
    return path


def test_json_lines_are_rows_with_their_place(tmp_path):
    path = write_lines(tmp_path / "a.jsonl")
    path.write_text(path.read_text("utf-8").replace("\n{", "\n\n{", 1), "utf-8")
    assert [(row.where, row.values) for row in read_rows(path)] == [
        ("a.jsonl:1", ROWS[0]),
        ("a.jsonl:3", ROWS[1]),
        ("a.jsonl:4", ROWS[2]),
    ]
    assert count_rows(path) == 3


@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_a_json_array_is_read_in_pieces(tmp_path, monkeypatch, chunk):
    monkeypatch.setattr(module, "_CHUNK", chunk)
    path = tmp_path / "a.json"
    path.write_text(json.dumps(ROWS, indent=2), "utf-8")
    assert [(row.where, row.values) for row in read_rows(path)] == [
        ("a.json[0]", ROWS[0]),
        ("a.json[1]", ROWS[1]),
        ("a.json[2]", ROWS[2]),
    ]
    assert count_rows(path) is None


def test_a_json_file_of_lines_is_read_as_lines(tmp_path):
    assert [row.values for row in read_rows(write_lines(tmp_path / "a.json"))] == ROWS


def test_parquet_rows_lose_the_nulls_of_absent_fields(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [
        {
            "messages": [
                {"role": "user", "content": "1"},
                {"role": "assistant", "content": "2", "tool_calls": "[]"},
            ]
        },
        {"messages": [{"role": "user", "content": "3"}]},
    ]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=1)
    assert [(row.where, row.values) for row in read_rows(path)] == [
        ("a.parquet:1", rows[0]),
        ("a.parquet:2", rows[1]),
    ]
    assert count_rows(path) == 2


def test_a_folder_is_its_files_in_order(tmp_path):
    (tmp_path / "sub").mkdir()
    write_lines(tmp_path / "b.jsonl", ROWS[:1])
    write_lines(tmp_path / "sub" / "c.jsonl", ROWS[1:2])
    write_lines(tmp_path / "a.jsonl", ROWS[2:])
    (tmp_path / "README.md").touch()
    assert [row.where for row in read_rows(tmp_path)] == ["a.jsonl:1", "b.jsonl:1", "sub/c.jsonl:1"]
    assert count_rows(tmp_path) == 3


def test_only_what_is_asked_for_is_read(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a"}\nno JSON\n', "utf-8")
    rows = read_rows(path)
    assert next(rows).values == {"text": "a"}
    with pytest.raises(ValueError, match=r"a.jsonl:2: expected a JSON object, got b'no JSON"):
        next(rows)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b"[1]\n", r"a.jsonl:1: expected a JSON object with named columns, got '\[1\]'"),
        ("a.jsonl", b'{"a": "\xff"}\n', "a.jsonl:1: expected a JSON object"),
        ("a.json", b'[{"a": 1}, {"a": ', r"a.json\[1\]: expected JSON, got"),
        ("a.json", b'[{"a": 1}', r"a.json\[1\]: expected JSON, got ''"),
        ("a.json", b"[3]", r"a.json\[0\]: expected a JSON object with named columns, got '3'"),
        ("a.parquet", b"PAR0", "a.parquet: expected a Parquet file"),
        ("a.csv", b"a,b", "expected one of .jsonl, .json, .parquet, got a.csv; convert it first"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        list(read_rows(path))


def test_a_missing_path_and_an_empty_folder_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"expected a file or folder, got .*, which does not exist"):
        data_files(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"files in .*, got none; check the path"):
        data_files(tmp_path)
