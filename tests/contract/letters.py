"""Byte-level tokenizers for tables: letters, pairs of them and the end of a text; or all bytes."""

import functools

import tokenizers

from jspec.text.spelling import byte_characters
from jspec.text.tokenizer import Tokenizer

LETTERS = ("a", "b", "c", "d", "ab", "bc", "cd")
END = 7


@functools.cache
def letters_tokenizer() -> Tokenizer:
    """Written text is merged from the left: "abcd" is "ab", "cd"."""
    vocabulary = {text: id_ for id_, text in enumerate((*LETTERS, "<end>"))}
    merges = [("a", "b"), ("c", "d"), ("b", "c")]
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, merges))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken("<end>", special=True)])
    return Tokenizer(
        backend=backend,
        chat_templates={"default": "{% for message in messages %}{{ message.content }}{% endfor %}d"},
        special_tokens={},
        bos_id=None,
        eos_ids=(END,),
    )


BYTES_END, BYTES_CALL = 256, 257


@functools.cache
def bytes_tokenizer() -> Tokenizer:
    """One token per byte, the end of a text, and one more special token, "<call>"."""
    vocabulary = {character: byte for byte, character in byte_characters().items()}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    backend.add_special_tokens([tokenizers.AddedToken(token, special=True) for token in ("<end>", "<call>")])
    return Tokenizer(
        backend=backend,
        chat_templates={"default": "{% for message in messages %}{{ message.content }}{% endfor %}:"},
        special_tokens={},
        bos_id=None,
        eos_ids=(BYTES_END,),
    )
