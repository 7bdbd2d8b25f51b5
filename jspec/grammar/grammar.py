"""What an answer must look like, as a request says it."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

FORMS = ("json_schema", "json_object", "regex", "lark", "ebnf", "choice", "structural_tags")


@dataclasses.dataclass(frozen=True, kw_only=True)
class StructuralTag:
    """A stretch of free text that has a form, such as a call of a function."""

    begin: str  # text at which the form starts, such as '<tool_call>{"name": "timer", "arguments": '
    json_schema: Mapping[str, Any] | None = None  # of what stands between; or a lark grammar:
    lark: str | None = None
    end: str = ""
    trigger: str | None = (
        None  # text that must go on as a tag, and that `begin` starts with; None = all of it
    )

    def __post_init__(self) -> None:
        if not isinstance(self.begin, str) or not self.begin:
            raise ValueError(
                f"grammar.structural_tags.begin: expected at least one character, got {self.begin!r}; "
                "name the text that opens the tag"
            )
        if (self.json_schema is None) == (self.lark is None):
            raise ValueError(
                f"grammar.structural_tags: expected json_schema or lark for {self.begin!r}, got "
                f"{'neither' if self.lark is None else 'both'}; set one of them"
            )
        if self.json_schema is not None:
            _check_schema("grammar.structural_tags.json_schema", self.json_schema)
        if self.lark is not None:
            _check_text("grammar.structural_tags.lark", self.lark)
        if not isinstance(self.end, str):
            raise ValueError(f"grammar.structural_tags.end: expected text, got {self.end!r}; use '' for none")
        trigger = self.begin if self.trigger is None else self.trigger
        if not isinstance(trigger, str) or not trigger or not self.begin.startswith(trigger):
            raise ValueError(
                f"grammar.structural_tags.trigger: expected the start of {self.begin!r}, got {self.trigger!r}; "
                "shorten it, or leave it out"
            )
        object.__setattr__(self, "trigger", trigger)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grammar:
    """The form of an answer: exactly one of all fields but the last.

    The answer ends where the form is complete, and before that an end-of-sequence id is not emitted.
    """

    json_schema: Mapping[str, Any] | None = None  # {} = any JSON value
    json_object: bool = False
    regex: str | None = None  # of Rust's regex syntax; it holds for the whole answer
    lark: str | None = None  # with a rule `start`; see llguidance's documentation of its syntax
    ebnf: str | None = None  # llama.cpp's GBNF, with a rule `root`
    choice: Sequence[str] | None = None
    structural_tags: Sequence[StructuralTag] | None = None  # free text, but for these
    form: str = dataclasses.field(init=False, repr=False, compare=False)  # the name of the one that is set
    after: str | None = None  # everything may be said until this text, such as "</think>", has been

    def __post_init__(self) -> None:
        if not isinstance(self.json_object, bool):
            raise ValueError(
                f"grammar.json_object: expected True or False, got {self.json_object!r}; pass a bool"
            )
        given = [
            name for name in FORMS if getattr(self, name) is not None and getattr(self, name) is not False
        ]
        if len(given) != 1:
            raise ValueError(
                f"grammar: expected one of {', '.join(FORMS)}, got {', '.join(given) or 'none'}; set exactly one"
            )
        object.__setattr__(self, "form", given[0])
        if self.json_schema is not None:
            _check_schema("grammar.json_schema", self.json_schema)
        for name in ("regex", "lark", "ebnf"):
            if getattr(self, name) is not None:
                _check_text(f"grammar.{name}", getattr(self, name))
        if self.after is not None and (not isinstance(self.after, str) or not self.after):
            raise ValueError(
                f"grammar.after: expected at least one character, got {self.after!r}; use None for no marker"
            )
        if self.choice is not None:
            self._check_choice(self.choice)
        if self.structural_tags is not None:
            self._check_tags(self.structural_tags)

    @property
    def text(self) -> str:
        """Equal for equal forms; the marker is no part of it."""
        value = getattr(self, self.form)
        if self.structural_tags is not None:
            value = [dataclasses.asdict(tag) for tag in self.structural_tags]
        return f"{self.form} {json.dumps(value)}"

    def _check_choice(self, choice: Any) -> None:
        if (
            not isinstance(choice, Sequence)
            or isinstance(choice, str)
            or not choice
            or not all(isinstance(text, str) and text for text in choice)
        ):
            raise ValueError(
                f"grammar.choice: expected at least one text, none of them empty, got {choice!r}; "
                "list what may be answered"
            )
        object.__setattr__(self, "choice", tuple(choice))

    def _check_tags(self, tags: Any) -> None:
        if (
            not isinstance(tags, Sequence)
            or isinstance(tags, str)
            or not tags
            or not all(isinstance(tag, StructuralTag) for tag in tags)
        ):
            raise ValueError(
                f"grammar.structural_tags: expected at least one StructuralTag, got {tags!r:.100}; list them"
            )
        object.__setattr__(self, "structural_tags", tuple(tags))


def grammar_from_json(values: Any) -> Grammar:
    """A grammar from a JSON object with the fields of `Grammar`, its tags with those of `StructuralTag`.

    Raises:
      ValueError: no object, a field that does not exist, or a value that `Grammar` refuses.
    """
    values = _fields_of("grammar", values, Grammar)
    tags = values.get("structural_tags")
    if isinstance(tags, list):
        values["structural_tags"] = [
            StructuralTag(**_fields_of("grammar.structural_tags", tag, StructuralTag)) for tag in tags
        ]
    return Grammar(**values)


def _fields_of(name: str, values: Any, kind: type) -> dict[str, Any]:
    if not isinstance(values, Mapping):
        raise ValueError(f'{name}: expected an object, got {values!r:.100}; write {{"regex": "[0-9]+"}}')
    known = [field.name for field in dataclasses.fields(kind) if field.init]
    unknown = [key for key in values if key not in known]
    if unknown:
        raise ValueError(
            f"{name}: expected names out of {', '.join(known)}, got {', '.join(map(str, unknown))}; "
            "correct or remove them"
        )
    return dict(values)


def _check_text(name: str, text: Any) -> None:
    if not isinstance(text, str) or not text:
        raise ValueError(f"{name}: expected at least one character, got {text!r}; write the grammar")


def _check_schema(name: str, schema: Any) -> None:
    if not isinstance(schema, Mapping):
        raise ValueError(f"{name}: expected a JSON schema, got {schema!r:.100}; pass it as an object")
    try:
        json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as problem:
        raise ValueError(
            f"{name}: expected JSON, got a value that is none: {problem}; remove it"
        ) from problem
