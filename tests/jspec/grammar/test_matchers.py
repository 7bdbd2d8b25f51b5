"""Matchers of every form: what they allow, where they end, and that a detour leaves no trace."""

import json
import random
import re

import numpy as np
import pytest
from contract.letters import BYTES_CALL, BYTES_END, END, LETTERS, bytes_tokenizer, letters_tokenizer

from jspec.grammar.compiler import GrammarCompiler
from jspec.grammar.constraint import Constraint
from jspec.grammar.grammar import Grammar, StructuralTag
from jspec.grammar.tree import fill_allowed


@pytest.fixture(scope="module")
def letters():
    return GrammarCompiler(letters_tokenizer(), 8, (END,))


@pytest.fixture(scope="module")
def bytes_of():
    """A compiler for single bytes, and a target with a padded head."""
    return GrammarCompiler(bytes_tokenizer(), 300, (BYTES_END,))


def ids_of(bits) -> list[int]:
    return [i for i in range(32 * len(bits)) if int(bits[i // 32]) >> i % 32 & 1]


def takes(matcher, text: str) -> str:
    """Follows a text byte by byte: "no" if a byte is refused, else "complete", "may end" or "open"."""
    for byte in text.encode():
        allowed = matcher.allowed()
        if allowed is None or byte not in ids_of(allowed):
            return "no"
        matcher.accept(byte)
    if matcher.complete:
        return "complete"
    return "may end" if BYTES_END in ids_of(matcher.allowed()) else "open"


SCHEMA = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}, "n": {"type": "integer"}},
    "required": ["on", "n"],
    "additionalProperties": False,
}
FORMS = {
    "json_schema": (
        Grammar(json_schema=SCHEMA),
        {'{"on": true, "n": -3}': "complete", '{"on": true}': "no", '{"on": 1': "no", '{"on"': "open"},
    ),
    "json_object": (Grammar(json_object=True), {'{"a": [1, {"b": null}]}': "complete", "[1]": "no"}),
    "regex": (Grammar(regex="[0-9]{2,3}"), {"12": "may end", "123": "complete", "1": "open", "x": "no"}),
    "lark": (
        Grammar(lark='start: "(" start ")" | NUMBER\nNUMBER: /[0-9]/'),
        {"((7))": "complete", "((7)": "open", "7)": "no"},
    ),
    "ebnf": (Grammar(ebnf='root ::= "a" root "b" | "c"'), {"aacbb": "complete", "acbb": "no"}),
    "choice": (
        Grammar(choice=["yes", "yesterday", 'n"o']),
        {"yes": "may end", 'n"o': "complete", "ye": "open"},
    ),
    "tags": (
        Grammar(structural_tags=[StructuralTag(begin="<f>", json_schema=SCHEMA, end="</f>")]),
        {
            "say <f": "may end",
            "say <f>": "open",
            "say <f>x": "no",
            'say <f>{"on":false,"n":1}</f> then': "may end",
        },
    ),
    "tag of a grammar": (
        Grammar(structural_tags=[StructuralTag(begin="<f>", lark='start: "q"', end="</f>", trigger="<")]),
        {"a <f>q</f> b": "may end", "a <g": "no"},
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_texts_of_a_form_and_others(bytes_of, name):
    grammar, texts = FORMS[name]
    assert {text: takes(bytes_of.matcher(grammar), text) for text in texts} == texts


def test_special_tokens_are_allowed_only_where_they_are_named(bytes_of):
    free = bytes_of.matcher(Grammar(regex=r"(.|\n)+"))
    assert not {BYTES_END, BYTES_CALL} & set(ids_of(free.allowed()))
    tag = StructuralTag(begin="<call>", json_schema={}, end="!")
    matcher = bytes_of.matcher(Grammar(structural_tags=[tag]))
    assert BYTES_CALL in ids_of(matcher.allowed())
    matcher.accept(BYTES_CALL)
    assert takes(matcher, "[]") == "open"
    mixed = Grammar(structural_tags=[tag, StructuralTag(begin="<f>", json_schema={})])
    with pytest.raises(ValueError, match=r"grammar.structural_tags: .* only some are special tokens"):
        bytes_of.matcher(mixed)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"json_schema": {"type": "strong"}}, "grammar.json_schema: .* strong"),
        (
            {"json_schema": {"type": "string", "minLength": 3, "maxLength": 2}},
            "grammar.json_schema: .*Unsatisf",
        ),
        ({"json_schema": {"$ref": "#/nowhere"}}, "grammar.json_schema: "),
        ({"regex": "(a"}, "grammar.regex: expected a form that an answer can have, got .*unclosed group"),
        ({"lark": 'begin: "x"'}, "grammar.lark: .*no start rule"),
        ({"ebnf": 'root ::= "a'}, "grammar.ebnf: "),
        ({"regex": ""}, "grammar.regex"),
        ({"regex": "()"}, "grammar.regex: .* complete without any"),
    ],
)
def test_what_no_answer_can_be_is_refused(bytes_of, values, said):
    with pytest.raises(ValueError, match=said):
        bytes_of.matcher(Grammar(**values))


def test_form_without_a_first_token_is_refused(letters):
    with pytest.raises(
        ValueError, match=r"grammar.regex: expected a form that a token of this model can begin"
    ):
        letters.matcher(Grammar(regex="x+"))


@pytest.mark.parametrize("after", [None, "cab"])
def test_detours_leave_no_trace(letters, after):
    """Along random texts: after drafts that were taken back, refused ones included, a matcher is as new."""
    rng = random.Random(3)
    grammar = Grammar(regex="(ab|c|bc)+d{2}a*", after=after)
    for _ in range(40):
        matcher, text = letters.matcher(grammar), []
        while not matcher.complete and len(text) < 12:
            here = matcher.allowed().copy()
            for _ in range(3):
                steps = 0
                while steps < 4 and not matcher.complete and (bits := matcher.allowed()).any():
                    refused = rng.random() < 0.2
                    matcher.accept(rng.randrange(8) if refused else rng.choice(ids_of(bits[:1] & 0xFF)))
                    steps += 1
                matcher.rollback(steps)
                assert np.array_equal(matcher.allowed(), here)
            again = letters.matcher(grammar)
            for token in text:
                again.accept(token)
            assert np.array_equal(again.allowed(), here)
            text.append(rng.choice(ids_of(here[:1] & 0xFF)))
            matcher.accept(text[-1])


def test_random_texts_have_the_form(letters):
    rng, form = random.Random(5), "(ab|c|bc)+d{2}a*"
    spelled = [*LETTERS, ""]
    for _ in range(60):
        matcher, text = letters.matcher(Grammar(regex=form)), ""
        while not matcher.complete:
            token = rng.choice(ids_of(matcher.allowed()))
            matcher.accept(token)
            text += spelled[token]
        assert re.fullmatch(form, text)


@pytest.mark.parametrize(("regex", "tokens"), [("abc+", [3, 3]), ("ab?x", [0, 1])])
def test_text_that_cannot_go_on_is_told(letters, regex, tokens):
    """A refused token leads there, and so does one behind which the form needs what no token spells."""
    constraint = Constraint(letters.matcher(Grammar(regex=regex)))
    assert constraint.advance(tokens[:1]) is None and (regex == "abc+") == (constraint.failure is not None)
    assert constraint.advance(tokens[1:]) is None
    assert "the grammar allows nothing here" in constraint.failure


def test_node_that_the_grammar_cannot_go_on_from_ends_the_walk(letters):
    """Its row stays a distribution, and the token that leads there stays allowed, as without drafts."""
    matcher = letters.matcher(Grammar(regex="ab?x"))
    matcher.accept(0)
    rows = np.full((3, 1), -1, np.int32)
    assert fill_allowed(matcher, [1, 2], None, rows) == [1]
    assert ids_of(rows[0]) == [1]
    assert rows[1] == rows[2] == -1


def test_rows_of_a_tree_follow_their_parents(letters):
    """a ─ bc ─ d!, and beside it a ─ a (refused) ─ d, and c. "!" completes the form."""
    matcher = letters.matcher(Grammar(regex="a(bc|b)[cd]|c[ab]d"))
    rows = np.full((7, 1), -1, np.int32)
    complete = fill_allowed(matcher, [0, 5, 3, 0, 3, 2], [0, 1, 2, 1, 4, 0], rows)
    assert complete == [3]
    assert ids_of(rows[0]) == [0, 2, 4]
    assert ids_of(rows[1]) == [1, 5]
    assert ids_of(rows[2]) == [2, 3, END]
    assert rows[3] == rows[4] == rows[5] == -1  # complete, refused, behind a refused one
    assert ids_of(rows[6]) == [0, 1]


def test_without_end_of_sequence_ids_only_the_form_ends():
    compiler = GrammarCompiler(letters_tokenizer(), 8, ())
    matcher = compiler.matcher(Grammar(regex="a+b?"))
    matcher.accept(0)
    assert ids_of(matcher.allowed()) == [0, 1, 4]
    matcher.accept(1)
    assert matcher.complete
    dead = compiler.matcher(Grammar(regex="[ab]x"))
    dead.accept(0)
    assert not dead.complete and not dead.allowed().any()


def test_ignored_end_of_sequence_is_not_allowed(letters):
    for ends, wanted in ((True, [0, END]), (False, [0])):
        matcher = letters.matcher(Grammar(regex="a+"), ends_by_eos=ends)
        matcher.accept(0)
        assert ids_of(matcher.allowed()) == wanted


def test_schemas_are_compiled_once(letters, monkeypatch):
    letters.matcher(Grammar(choice=["abc", "d"]))
    monkeypatch.setattr(letters, "_source", None)
    assert letters.matcher(Grammar(choice=["abc", "d"], after="b"))
    with pytest.raises(TypeError):
        letters.matcher(Grammar(choice=["abc", "c"]))


def test_json_of_a_schema_is_what_a_parser_reads(bytes_of):
    rng = random.Random(1)
    for _ in range(5):
        matcher, text = bytes_of.matcher(Grammar(json_schema=SCHEMA)), bytearray()
        while not matcher.complete and len(text) < 200:
            wanted = [i for i in ids_of(matcher.allowed()) if i not in b" \n\t\r"]
            text.append(rng.choice(wanted))
            matcher.accept(text[-1])
        if matcher.complete:
            assert set(json.loads(text)) == {"on", "n"}
