"""What a grammar may say, before any model is asked."""

import json
import subprocess
import sys

import pytest

from jspec.grammar.grammar import Grammar, StructuralTag, grammar_from_json
from jspec.settings import Settings, settings_from_json


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, "grammar: expected one of json_schema, .* got none"),
        ({"after": "x"}, "grammar: expected one of .* got none"),
        ({"regex": "a", "lark": "b"}, "got regex, lark; set exactly one"),
        ({"regex": ""}, "grammar.regex: expected at least one character, got ''"),
        ({"regex": 1}, "grammar.regex: expected at least one character, got 1"),
        ({"json_object": 1}, "grammar.json_object: expected True or False, got 1"),
        ({"json_schema": "{}"}, "grammar.json_schema: expected a JSON schema, got '{}'"),
        ({"json_schema": {"a": {1, 2}}}, "grammar.json_schema: expected JSON, got a value that is none"),
        ({"choice": []}, "grammar.choice: expected at least one text"),
        ({"choice": "ab"}, "grammar.choice: expected at least one text, none of them empty, got 'ab'"),
        ({"choice": ["a", ""]}, "grammar.choice: expected at least one text, none of them empty"),
        ({"structural_tags": []}, "grammar.structural_tags: expected at least one"),
        ({"structural_tags": [{"begin": "x"}]}, "expected json_schema or lark for 'x', got neither"),
        (
            {"structural_tags": [{"begin": "x", "lark": "y", "trigger": "z"}]},
            "structural_tags.trigger: expected the start of 'x', got 'z'",
        ),
        ({"structural_tags": [{"begin": "x", "lark": "y", "what": 1}]}, "structural_tags: .* got what"),
        ({"regex": "a", "after": ""}, "grammar.after: expected at least one character"),
        ({"regexp": "a"}, "grammar: expected names out of json_schema, .* got regexp"),
        ("a", "grammar: expected an object, got 'a'"),
    ],
)
def test_what_is_no_grammar_is_refused(values, said, unchecked):
    with pytest.raises(ValueError, match=said):
        grammar_from_json(values)


def test_grammars_of_json_are_those_of_python():
    tag = {"begin": "<f>", "json_schema": {"type": "object"}, "end": "</f>", "trigger": "<f"}
    for values in (
        {"choice": ["a", "b"]},
        {"json_object": True, "after": "</think>"},
        {"structural_tags": [tag]},
    ):
        made = grammar_from_json(json.loads(json.dumps(values)))
        assert settings_from_json({"grammar": values}, Settings()).grammar == made
    assert made == Grammar(structural_tags=[StructuralTag(**tag)])
    assert made.form == "structural_tags"


def test_settings_take_grammars_only(unchecked):
    with pytest.raises(ValueError, match=r"grammar: expected a jspec.Grammar, got 'a\+'"):
        Settings(grammar="a+")  # type: ignore[arg-type]


def test_jspec_is_imported_without_llguidance():
    code = "import sys, jspec; assert 'llguidance' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
