"""A tokenizer for the table of 8 tokens: its ids are spelled as numbers, "seven" ends a turn of a chat."""

import tokenizers

from jspec.text.tokenizer import Tokenizer

WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven")


def words_tokenizer() -> Tokenizer:
    """Text is words between spaces; others count as zero."""
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: id_ for id_, word in enumerate(WORDS)}, unk_token="zero")
    )
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return Tokenizer(
        backend=backend,
        chat_templates={"default": "{% for message in messages %}{{ message.content }} seven {% endfor %}"},
        special_tokens={},
        bos_id=None,
        eos_ids=(),
    )
