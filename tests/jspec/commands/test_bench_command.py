"""`jspec bench` on a table of 8 words."""

import json

import pytest
from contract.engines import engine
from contract.words import words_tokenizer

from jspec.cli import main
from jspec.commands import bench as command


@pytest.mark.parametrize("temperature", ["0", "1"])
def test_tokens_are_compared_greedy_and_sampled(monkeypatch, capsys, tmp_path, temperature):
    monkeypatch.setattr(command, "load", lambda *_, **__: engine("plain", tokenizer=words_tokenizer()))
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "one two one two", "task": "words"}\n')
    settings = ["--max-tokens", "9", "--temperature", temperature, "--repeats", "1", "--no-costs"]
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "--prompts", str(prompts), "--json", str(out), *settings])
    assert not exit_.value.code
    shown = capsys.readouterr().out
    assert "identical" in shown and "by position" in shown
    plain, ngram = json.loads(out.read_text())["measurements"]
    assert (plain["identical"], ngram["identical"]) == (None, True)
    assert ngram["counters"]["emitted"] == 9


def test_trees_are_for_all_checkpoints_or_for_the_one_named():
    assert command.by_drafter("tree", ["2x3x5", "b=3x3x8"], ["a", "b"]) == {
        "a": ["2x3x5"],
        "b": ["2x3x5", "3x3x8"],
    }
    with pytest.raises(ValueError, match=r"tree: expected one of \['a'\] before the =, got 'c'"):
        command.by_drafter("tree", ["c=2x3x5"], ["a"])
    with pytest.raises(ValueError, match="tree: expected none without a checkpoint, got 2x3x5"):
        command.by_drafter("tree", ["2x3x5"], [])
