"""From a request's grammar to matchers for one model."""

import collections
import functools
import json
import threading
from collections.abc import Sequence
from typing import Any

import llguidance
import numpy as np
from jaxtyping import Int

from jspec.grammar.grammar import Grammar, StructuralTag
from jspec.grammar.marker import AfterMarker
from jspec.grammar.matcher import LlguidanceMatcher
from jspec.grammar.vocabulary import Vocabulary
from jspec.text.tokenizer import Tokenizer

KEPT = 64  # compiled grammars


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps those that were used last. Any thread may ask."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        """See `Vocabulary` for the arguments and what raises."""
        self._tokenizer = tokenizer
        self._of_vocabulary = functools.partial(Vocabulary, tokenizer, vocab_size, eos_ids)
        self._limits = llguidance.LLParserLimits(verbose_errors=False)
        self._words = -(-vocab_size // 32)
        self._ends = bool(eos_ids)
        self._lock = threading.Lock()
        self._compiled: collections.OrderedDict[str, llguidance.LLMatcher] = collections.OrderedDict()

    @functools.cached_property
    def _vocabulary(self) -> Vocabulary:
        return self._of_vocabulary()

    @functools.cached_property
    def _llguidance(self) -> llguidance.LLTokenizer:
        return self._vocabulary.llguidance()

    @functools.cached_property
    def _end_bits(self) -> Int[np.ndarray, "words"]:
        bits = np.zeros((self._words, 32), bool)
        for id_ in self._vocabulary.eos_ids:
            if id_ < bits.size:  # a made-up one may lie past the last word
                bits[id_ // 32, id_ % 32] = True
        return np.packbits(bits, axis=1, bitorder="little").view("<i4")[:, 0]

    def prepare(self) -> None:
        """Does now what the first matcher would wait for: some tenths of a second."""
        assert self._llguidance

    def matcher(self, grammar: Grammar, *, ends_by_eos: bool = True) -> LlguidanceMatcher | AfterMarker:
        """A matcher at the start of an answer.

        Args:
          grammar: of the request.
          ends_by_eos: False = the request ignores end-of-sequence ids.

        Raises:
          ValueError: the grammar is none, nothing has this form, or it has no first token.
        """
        start = self._start(grammar)
        matcher = LlguidanceMatcher(start, self._end_bits, ends_by_eos=ends_by_eos and self._ends)
        allowed = matcher.allowed()
        if allowed is None or not allowed.any():
            got = "one that is complete without any" if allowed is None else f"an error: {matcher.problem}"
            raise ValueError(
                f"grammar.{grammar.form}: expected a form that a token of this model can begin, got {got}; correct it"
            )
        if grammar.after is None:
            return matcher
        spelled = self._vocabulary.tokens
        return AfterMarker(grammar.after.encode(), lambda id_: spelled[id_], matcher, self._words)

    def _start(self, grammar: Grammar) -> llguidance.LLMatcher:
        with self._lock:
            if (known := self._compiled.get(grammar.text)) is not None:
                self._compiled.move_to_end(grammar.text)
                return known
        try:
            source = self._source(grammar)
        except ValueError as problem:
            raise self._refused(grammar, str(problem)) from problem
        start = llguidance.LLMatcher(self._llguidance, source, log_level=0, limits=self._limits)
        if start.is_error():
            raise self._refused(grammar, start.get_error())
        with self._lock:
            self._compiled[grammar.text] = start
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return start

    def _refused(self, grammar: Grammar, problem: str) -> ValueError:
        said = " ".join(problem.partition("<backtrace>")[0].split())
        return ValueError(
            f"grammar.{grammar.form}: expected a form that an answer can have, got {said:.300}; correct it"
        )

    def _source(self, grammar: Grammar) -> str:
        """The grammar as llguidance takes it."""
        if grammar.structural_tags is not None:
            return self._tags(grammar.structural_tags)
        if grammar.json_object:
            return llguidance.LLMatcher.grammar_from_json_schema({"type": "object"})
        value: Any = getattr(grammar, grammar.form)
        text = value if isinstance(value, str) else json.dumps(value)
        return llguidance.grammar_from(grammar.form, text)  # type: ignore[arg-type]  # its names are ours

    def _tags(self, tags: Sequence[StructuralTag]) -> str:
        """Free text with tags. llguidance writes triggers as text, or all of them as special tokens."""
        backend = self._tokenizer.backend
        triggers = [str(tag.trigger) for tag in tags]
        special = [backend.token_to_id(trigger) in self._tokenizer.special_ids for trigger in triggers]
        if any(special) and not all(special):
            raise ValueError(f"triggers of which only some are special tokens: {', '.join(triggers)}")
        listed = [
            llguidance.StructTag(
                trigger=trigger,
                begin=tag.begin,
                grammar=dict(tag.json_schema) if tag.json_schema is not None else str(tag.lark),
                end=tag.end,
            )
            for trigger, tag in zip(triggers, tags, strict=True)
        ]
        return llguidance.StructTag.to_grammar(listed, assume_special=all(special))
