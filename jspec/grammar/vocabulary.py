"""The bridge from jspec's tokenizers to llguidance: the bytes of every token, as results spell them."""

from collections.abc import Sequence

import llguidance

from jspec.text.tokenizer import Tokenizer

START = "\x02"  # a byte that tokenizers neither merge with others nor put a space before


class Vocabulary:
    """What llguidance asks of a tokenizer, answered by a `Tokenizer`.

    The bytes are those that a `Detokenizer` makes text of, so a result's text has the form that it was
    decoded under. (A SentencePiece-like tokenizer drops one space before a text; a form that begins with
    one may lose it.) Special tokens have no text: a form allows them only where it names them.
    """

    is_tokenizer_wrapper = True  # for llguidance

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]):
        """
        Args:
          tokenizer: its tokens spell bytes.
          vocab_size: of the target; ids past it cannot be emitted.
          eos_ids: that end a text; none = one is made up that cannot be emitted.

        Raises:
          ValueError: the tokenizer works on words.
        """
        if tokenizer.spelling is None:
            raise ValueError(
                "grammar: expected a tokenizer whose tokens spell bytes, got one that works on words; "
                "use a byte-level or SentencePiece-like tokenizer"
            )
        self._tokenizer, self._spell = tokenizer, tokenizer.spelling.token_bytes
        self.tokens = [self._bytes_of(id_) for id_ in range(vocab_size)]
        self.special_token_ids = sorted(id_ for id_ in tokenizer.special_ids if id_ < vocab_size)
        self.bos_token_id = None
        self.eos_ids = list(eos_ids)
        if not self.eos_ids:
            self.tokens.append(b"<no end of text>")
            self.eos_ids = [vocab_size]
            self.special_token_ids.append(vocab_size)
        self.eos_token_id = self.eos_ids[0]

    def llguidance(self) -> llguidance.LLTokenizer:
        """The tokenizer that grammars are compiled for; takes a few tenths of a second."""
        return llguidance.LLTokenizer(self, eos_token=self.eos_ids)  # type: ignore[arg-type]

    def __call__(self, text: str) -> list[int]:
        """Ids that spell exactly `text`, as the tokenizer would write it inside of a text.

        llguidance keeps text that a form prescribes to these ids, so that the model sees it as it has learnt
        it.
        """
        for before in ("", START):
            ids = self._tokenizer.encode(before + text, add_special=False)
            for skip in range(min(3, len(ids)) if before else 1):
                if all(id_ < len(self.tokens) for id_ in ids) and self.spelled(ids[skip:]) == text.encode():
                    return ids[skip:]
        return []  # llguidance falls back to the longest token at each place

    def spelled(self, ids: Sequence[int]) -> bytes:
        """The bytes of a sequence of ids."""
        return b"".join(self.tokens[id_] for id_ in ids)

    def _bytes_of(self, id_: int) -> bytes:
        token = self._tokenizer.backend.id_to_token(id_)
        return b"" if token is None else self._spell(token)
