"""Pieces of text add up to the whole, however the tokens are grouped."""

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models

from jspec.text.detokenize import Detokenizer
from jspec.text.tokenizer import Tokenizer

GROUPS = st.lists(st.lists(st.integers(0, 49200), max_size=6), max_size=8)


def pieces(tokenizer: Tokenizer, groups: list[list[int]], *, skip_special: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special=skip_special)
    return [*(detokenizer.push(group) for group in groups), detokenizer.flush()]


@settings(max_examples=300, deadline=None)
@given(groups=GROUPS, skip_special=st.booleans())
def test_pieces_add_up_to_the_librarys_text_of_all_ids(smollm2, groups, skip_special):
    ids = [id_ for group in groups for id_ in group]
    text = "".join(pieces(smollm2, groups, skip_special=skip_special))
    assert text == smollm2.backend.decode(ids, skip_special_tokens=skip_special)
    assert text == smollm2.decode(ids, skip_special=skip_special)


# Ids 0..272 hold the special tokens and all single bytes: mostly broken UTF-8.
@settings(max_examples=300, deadline=None)
@given(groups=st.lists(st.lists(st.integers(0, 272), max_size=4), max_size=8))
def test_broken_characters_are_replaced_as_the_library_does(smollm2, groups):
    ids = [id_ for group in groups for id_ in group]
    assert "".join(pieces(smollm2, groups)) == smollm2.backend.decode(ids)


def byte_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """A text spelled byte by byte."""
    by_byte = {tokenizer.spelling.token_bytes(tokenizer.backend.id_to_token(i)): i for i in range(17, 273)}
    return [by_byte[bytes([byte])] for byte in text.encode()]


def test_a_character_appears_with_the_token_that_completes_it(smollm2):
    assert pieces(smollm2, [[i] for i in byte_ids(smollm2, "é😀!")]) == ["", "é", "", "", "", "😀", "!", ""]
    assert pieces(smollm2, [byte_ids(smollm2, "é😀")[:5], byte_ids(smollm2, "😀a")[3:]]) == ["é", "😀a", ""]


def test_a_text_that_ends_inside_a_character_ends_with_a_replacement(smollm2):
    assert pieces(smollm2, [byte_ids(smollm2, "a😀")[:-1]]) == ["a", "\ufffd"]


def test_a_skipped_token_does_not_disturb_a_character_around_it(smollm2):
    first, second = byte_ids(smollm2, "é")
    assert pieces(smollm2, [[first], [2], [second]]) == ["", "", "é", ""]


@settings(max_examples=300, deadline=None)
@given(groups=st.lists(st.lists(st.integers(0, 490), max_size=5), max_size=8), skip_special=st.booleans())
def test_sentencepiece_pieces_add_up_to_the_librarys_text(sentencepiece, groups, skip_special):
    backend = sentencepiece.backend
    ordinary = [
        [id_ for id_ in group if not (backend.id_to_token(id_) or "").startswith("<0x")] for group in groups
    ]
    ids = [id_ for group in ordinary for id_ in group]
    text = "".join(pieces(sentencepiece, ordinary, skip_special=skip_special))
    assert text == backend.decode(ids, skip_special_tokens=skip_special)
    # Runs of byte tokens are replaced as Unicode recommends, so here the whole is our own decode.
    everything = [id_ for group in groups for id_ in group]
    assert "".join(pieces(sentencepiece, groups)) == sentencepiece.decode(everything)


def test_sentencepiece_byte_tokens_join_to_characters(sentencepiece):
    text = "x 😀\r東"
    ids = sentencepiece.encode(text, add_special=False)
    assert "".join(pieces(sentencepiece, [[id_] for id_ in ids])) == text == sentencepiece.backend.decode(ids)


def test_only_the_space_before_the_text_is_dropped(sentencepiece):
    for text in ("two words", " two", "  two "):
        ids = sentencepiece.encode(text)  # with BOS
        assert "".join(pieces(sentencepiece, [[id_] for id_ in ids])) == text


def words(decoder: decoders.Decoder | None, tokens: list[str]) -> Tokenizer:
    backend = tokenizers.Tokenizer(
        models.WordLevel({token: i for i, token in enumerate(tokens)}, unk_token=tokens[0])
    )
    if decoder is not None:
        backend.decoder = decoder
    backend.add_special_tokens(["<s>"])
    return Tokenizer(backend=backend, chat_templates={}, special_tokens={}, bos_id=None, eos_ids=())


@pytest.mark.parametrize(
    "tokenizer",
    [
        words(decoders.WordPiece(), ["un", "##able", "##s", ",", "do", "n't", "."]),
        words(decoders.Metaspace(), ["▁", "▁a", "b", "▁▁", "c▁"]),
        words(decoders.BPEDecoder(suffix="</w>"), ["a", "b</w>", "</w>", "c"]),
        words(None, ["one", "two", "three"]),
    ],
    ids=["wordpiece", "metaspace", "suffix", "words"],
)
@settings(max_examples=150, deadline=None)
@given(groups=st.lists(st.lists(st.integers(0, 8), max_size=4), max_size=6))
def test_decoders_that_work_on_words_add_up_too(tokenizer, groups):
    ids = [id_ for group in groups for id_ in group]
    assert "".join(pieces(tokenizer, groups)) == tokenizer.backend.decode(ids)


def test_a_decoder_that_falls_back_to_bytes_in_another_way_is_refused():
    tokenizer = words(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]), ["a"])
    with pytest.raises(ValueError, match=r"^tokenizer: expected a ByteLevel decoder .* got \['ByteFallback'"):
        Detokenizer(tokenizer)
