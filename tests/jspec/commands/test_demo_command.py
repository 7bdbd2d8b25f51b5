"""`jspec demo` on a table of 8 words."""

import pytest
from contract.engines import engine
from contract.words import words_tokenizer

from jspec.cli import main
from jspec.commands import demo as command


def test_demo_shows_whole_prompts_and_runs_a_trained_drafter_on_what_it_learned(monkeypatch, capsys):
    """The trained drafter is one by name: on a table of words a folder can hold none."""
    monkeypatch.setattr(command, "load", lambda *_, **__: engine("plain", tokenizer=words_tokenizer()))
    monkeypatch.setattr(command, "PROMPTS", ("one two\n\n[bold]three", "four"))
    monkeypatch.setattr(command, "CALLS", (command.asked("three four"),))
    with pytest.raises(SystemExit) as exit_:
        main(["demo", "--max-tokens", "12", "--calls", "ngram"])
    shown = capsys.readouterr().out
    assert not exit_.value.code
    assert shown.count("> one two\n> \n> [bold]three\n") == 2
    assert shown.count("tokens identical: yes") == 2
    assert shown.index("JSON function calls, with") < shown.index("> three four")
    assert "jspec bench interleaves repeats" in " ".join(shown.split())
