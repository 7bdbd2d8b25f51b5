"""Options that give answers a form, on a table of 8 letters."""

import json

import pytest
from contract.engines import shared
from contract.letters import END, letters_tokenizer

from jspec.cli import main
from jspec.commands import generate as command
from jspec.commands.forms import grammar_of
from jspec.grammar.grammar import Grammar

NONE = dict(json_schema=None, json_object=False, regex=None, file=None, choice=None, after=None)


def test_answer_has_the_form_of_an_option(monkeypatch, capsys, unchecked):
    engine = shared("oracle", tokenizer=letters_tokenizer(), eos_ids=(END,), max_slots=3)
    monkeypatch.setattr(command, "load", lambda model, **options: engine)
    for option, value, wanted in (("--regex", "dcb", "dcb"), ("--choice", "abcd", "abcd")):
        with pytest.raises(SystemExit) as exit_:
            main(["generate", "abc", option, value])
        assert not exit_.value.code
        assert capsys.readouterr().out == f"{wanted}\n"


def test_files_are_read_by_their_kind(tmp_path):
    schema, lark, gbnf = tmp_path / "a.json", tmp_path / "b.lark", tmp_path / "c.gbnf"
    schema.write_text(json.dumps({"type": "boolean"}))
    lark.write_text('start: "a"')
    gbnf.write_text('root ::= "a"')
    assert grammar_of(**NONE | {"json_schema": schema}) == Grammar(json_schema={"type": "boolean"})
    assert grammar_of(**NONE | {"file": lark}) == Grammar(lark='start: "a"')
    assert grammar_of(**NONE | {"file": gbnf, "after": "x"}) == Grammar(ebnf='root ::= "a"', after="x")
    assert grammar_of(**NONE) is None


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"json_schema": "broken.json"}, "json_schema: expected JSON in .*broken.json"),
        ({"json_schema": "missing.json"}, "json_schema: expected text, got .*missing.json.*check the path"),
        ({"file": "grammar.txt"}, "grammar: expected a .lark, .ebnf or .gbnf file"),
        ({"regex": "a", "choice": ["b"]}, "grammar: expected one of .* got regex, choice"),
        ({"after": "x"}, "grammar: expected one of .* got none"),
    ],
)
def test_what_is_wrong_is_said(tmp_path, given, said):
    (tmp_path / "broken.json").write_text("{")
    paths = {k: tmp_path / v for k, v in given.items() if k in ("json_schema", "file")}
    with pytest.raises(ValueError, match=said):
        grammar_of(**NONE | given | paths)
