"""GGUF keys are read without opening the tensors."""

from pathlib import Path

import gguf
import numpy as np
import pytest

from jspec.checkpoints.gguf_metadata import read_gguf_metadata


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint8("u8", 200)
    writer.add_int8("i8", -3)
    writer.add_uint16("u16", 60000)
    writer.add_int16("i16", -300)
    writer.add_uint32("u32", 4_000_000_000)
    writer.add_int32("i32", -70000)
    writer.add_uint64("u64", 2**63)
    writer.add_int64("i64", -(2**40))
    writer.add_float32("f32", 0.5)
    writer.add_float64("f64", 0.1)
    writer.add_bool("flag", True)
    writer.add_string("text", "naïve 東京")
    writer.add_array("numbers", [1, -2, 3])
    writer.add_array("scores", [0.5, -1.25])
    writer.add_array("words", ["a", "", "ü"])
    writer.add_tensor("t", np.zeros((2, 3), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_every_type_is_read_as_a_python_value(file):
    assert read_gguf_metadata(file) == {
        "general.architecture": "llama",
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 4_000_000_000,
        "i32": -70000,
        "u64": 2**63,
        "i64": -(2**40),
        "f32": 0.5,
        "f64": 0.1,
        "flag": True,
        "text": "naïve 東京",
        "numbers": [1, -2, 3],
        "scores": [0.5, -1.25],
        "words": ["a", "", "ü"],
    }


def test_a_file_that_ends_early_is_refused_wherever_it_ends(file):
    whole = file.read_bytes()
    end_of_keys = whole.index(b"words") + len(b"words")
    for size in range(4, end_of_keys):
        file.write_bytes(whole[:size])
        with pytest.raises(
            ValueError, match=r"model.gguf: expected readable metadata, got .*; download the file again"
        ):
            read_gguf_metadata(file)


def test_another_file_is_refused(tmp_path):
    path = tmp_path / "x.gguf"
    for content in (b"", b"PK\x03\x04 something else"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"x.gguf: expected a GGUF file, got other contents"):
            read_gguf_metadata(path)


def test_a_length_that_no_file_can_hold_is_refused(file):
    whole = file.read_bytes()
    at = whole.index("naïve".encode()) - 8
    file.write_bytes(whole[:at] + b"\xff" * 8 + whole[at + 8 :])
    with pytest.raises(ValueError, match=r"a string that ends after the file"):
        read_gguf_metadata(file)
