"""A byte-level tokenizer for the table of 8 tokens: letters, pairs of them, and the end of a text."""

import functools

import tokenizers

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
