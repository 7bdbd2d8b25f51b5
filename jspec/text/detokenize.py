"""Incremental text: token ids in, in any grouping; the text that is final so far out."""

import codecs
from collections.abc import Iterable
from typing import SupportsIndex

from jspec.text.tokenizer import Tokenizer


class Detokenizer:
    """Turns one sequence of token ids into text, piece by piece.

    The pieces joined are the same whatever the grouping of the ids, and each token costs the same however
    long the text is. A character whose bytes are spread over several tokens appears with the token that
    completes it; until then its bytes are held back. Ids past the vocabulary (a padded head has them) have
    no text, as in the `tokenizers` library.

    For byte-level vocabularies the text is that of `tokenizers.Tokenizer.decode`. So it is for
    SentencePiece-like ones, except that invalid bytes are replaced as Unicode recommends (one U+FFFD for
    each longest broken sequence); the library replaces every byte of a run of byte tokens, valid ones
    before it included, which no stream could do without taking text back.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        """Starts at the beginning of a text.

        Args:
          tokenizer: knows what each id spells.
          skip_special: leaves special tokens, such as the end of a turn, out of the text.
        """
        self._tokenizer = tokenizer
        self._spelling = tokenizer.spelling
        self._skipped_ids = tokenizer.special_ids if skip_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        self._previous: int | None = None

    def push(self, ids: Iterable[SupportsIndex]) -> str:
        """Takes the next ids; returns the text that became final.

        Raises:
          ValueError: an id is negative.
        """
        return "".join([self._step(id_.__index__()) for id_ in ids])

    def flush(self) -> str:
        """Ends the text: an incomplete character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True)

    def _step(self, id_: int) -> str:
        if id_ < 0:
            raise ValueError(f"ids: expected numbers from 0 on, got {id_}; drop padding before decoding")
        if id_ in self._skipped_ids:
            return ""
        token = self._tokenizer.backend.id_to_token(id_)
        if token is None:
            return ""
        if self._spelling is None:
            return self._word(id_)
        new = self._spelling.token_bytes(token)
        if self._at_start and new:
            self._at_start = False
            if self._spelling.drop_leading_space:
                new = new.removeprefix(b" ")
        return self._utf8.decode(new)

    def _word(self, id_: int) -> str:
        """What `id_` adds to the token before it: such decoders look no further back than that."""
        before = [] if self._previous is None else [self._previous]
        self._previous = id_
        decode = self._tokenizer.backend.decode
        known = decode(before, skip_special_tokens=False) if before else ""
        return decode([*before, id_], skip_special_tokens=False)[len(known) :]
