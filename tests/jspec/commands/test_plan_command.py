"""`jspec plan` of a small target, with and without the compiler for TPUs."""

import json
from pathlib import Path

import pytest
from compile_checks import needs_libtpu

from jspec.cli import main

TARGET = Path(__file__).parents[2] / "data" / "targets" / "llama_plain"


def test_without_libtpu_one_line_names_the_extra(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("TPU_LIBRARY_PATH", str(tmp_path / "libtpu.so"))
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--target", str(TARGET), "--topology", "v5e:2x4"])
    assert ended.value.code == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith("jspec plan: libtpu: expected the compiler for TPUs")
    assert "pip install 'jspec[tpu-aot]'" in said
    assert "\n" not in said


def test_more_lanes_than_slots_are_refused(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--target", str(TARGET), "--topology", "v5e:2x4", "--slots", "2", "--lanes", "3"])
    assert capsys.readouterr().err.strip() == "jspec plan: lanes: expected 1 to 2 slots, got 3; add slots"


@pytest.mark.extended
@needs_libtpu
def test_a_plan_tells_facts_from_estimates(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "220")
    options = [
        "--drafter",
        "ngram",
        "--draft-length",
        "3",
        "--slots",
        "2",
        "--context",
        "256",
        "--chunk",
        "31",
    ]
    with pytest.raises(SystemExit) as ended:
        main(["plan", "--target", str(TARGET), "--topology", "v5e:2x4", "--tensor", "2", *options])
    assert not ended.value.code
    said = capsys.readouterr().out
    for piece in (
        "pages for 512 tokens",
        "fact",
        "tokens of context that fit",
        "estimate",
        "all-reduce",
        "Break-even",
    ):
        assert piece in said, said


@pytest.mark.extended
@needs_libtpu
def test_an_unknown_topology_is_refused_in_one_line(capsys):
    with pytest.raises(SystemExit):
        main(["plan", "--target", str(TARGET), "--topology", "v5e:3x3"])
    said = capsys.readouterr().err.strip()
    assert said.startswith("jspec plan: topology: expected one of"), said
    assert json.dumps(said).count("\\n") == 0
