"""Whether the requests of an engine may have a grammar."""

import importlib.util
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from jspec.grammar.constraint import Following
from jspec.grammar.grammar import Grammar
from jspec.text.tokenizer import Tokenizer


@runtime_checkable
class Grammars(Protocol):
    """Makes matchers: `jspec.grammar.compiler.GrammarCompiler`, which needs llguidance."""

    def matcher(self, grammar: Grammar, *, ends_by_eos: bool = True) -> Following:
        """A matcher at the start of an answer; ValueError for a grammar that is none."""
        ...

    def prepare(self) -> None:
        """Does now what the first matcher would wait for."""
        ...


def grammars_for(
    tokenizer: Tokenizer | None,
    *,
    vocab_size: int,
    eos_ids: Sequence[int],
    simulated: bool,
    wanted: bool | None,
) -> tuple[Grammars | None, str]:
    """What makes matchers for an engine, or None and the reason.

    Args:
      tokenizer: of the engine.
      vocab_size: of the target.
      eos_ids: that end its texts.
      simulated: whether its drafter forces accept lengths, and so emits what no target chose.
      wanted: None = if it is possible.

    Raises:
      ValueError: it is wanted and not possible.
    """
    reason = ""
    if wanted is False:
        reason = "it was made with grammar=False"
    elif simulated:
        reason = "its drafter forces accept lengths"
    elif tokenizer is None:
        reason = "it has no tokenizer"
    elif tokenizer.spelling is None:
        reason = "its tokenizer works on words and not on bytes"
    elif importlib.util.find_spec("llguidance") is None:
        reason = "llguidance is not installed (pip install 'jspec[grammar]')"
    if reason or tokenizer is None:
        if wanted:
            raise ValueError(
                f"grammar: expected None or False for this engine, as {reason}, got True; leave it out"
            )
        return None, reason
    from jspec.grammar.compiler import GrammarCompiler

    return GrammarCompiler(tokenizer, vocab_size, eos_ids), ""
