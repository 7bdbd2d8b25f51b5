"""Tokenizers rebuilt from GGUF metadata."""

import json
from pathlib import Path

import pytest

from jspec.checkpoints.gguf_tokenizer import tokenizer_from_gguf
from jspec.text.spelling import byte_characters

DATA = Path(__file__).parents[1] / "text" / "data"
SENTENCEPIECE = {
    kind: json.loads((DATA / f"sentencepiece_{kind}.json").read_text()) for kind in ("llama", "gemma")
}


def byte_level(**keys: object) -> dict[str, object]:
    """All bytes, three merges, two control tokens and one that a user defined."""
    tokens = [*byte_characters().values(), "ab", "abc", "12", "<s>", "<end>", "<tool>"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 259 + [3, 3, 4],
        "tokenizer.ggml.merges": ["a b", "ab c", "1 2"],
        "tokenizer.ggml.bos_token_id": 259,
        "tokenizer.ggml.eos_token_id": 260,
        **{f"tokenizer.ggml.{key}": value for key, value in keys.items()},
    }


def tokens_of(metadata: dict[str, object], text: str) -> list[str]:
    return tokenizer_from_gguf(metadata).backend.encode(text).tokens


@pytest.mark.parametrize(
    ("kind", "case"),
    [(kind, case) for kind, content in SENTENCEPIECE.items() for case in content["cases"]],
    ids=lambda value: value if isinstance(value, str) else ascii(value["text"]),
)
def test_sentencepiece_vocabularies_give_the_ids_of_sentencepiece(kind, case):
    tokenizer = tokenizer_from_gguf(SENTENCEPIECE[kind]["metadata"])
    assert tokenizer.encode(case["text"], add_special=False) == case["ids"]
    assert tokenizer.decode(case["ids"]) == case["text"]


def test_sentencepiece_text_begins_with_bos_unless_the_file_says_no():
    metadata = SENTENCEPIECE["llama"]["metadata"]
    bare = tokenizer_from_gguf(metadata).encode("a", add_special=False)
    assert tokenizer_from_gguf(metadata).encode("a") == [1, *bare]
    without = {**metadata, "tokenizer.ggml.add_bos_token": False}
    assert tokenizer_from_gguf(without).encode("a") == bare


def test_control_tokens_are_special_and_user_defined_ones_are_text():
    tokenizer = tokenizer_from_gguf(byte_level())
    assert tokenizer.encode("<end>a<tool>b") == [260, *tokenizer.encode("a"), 261, *tokenizer.encode("b")]
    assert tokenizer.special_ids == {259, 260}
    assert tokenizer.decode([260, 261]) == "<tool>"


def test_text_is_cut_as_the_file_names():
    assert tokens_of(byte_level(), "abc12") == ["abc", "12"]
    assert tokens_of(byte_level(pre="smollm"), "abc12") == ["abc", "1", "2"]
    assert tokens_of(byte_level(pre="qwen2"), "abc12") == ["abc", "1", "2"]
    assert tokens_of(byte_level(pre="llama-bpe"), "abc12") == ["<s>", "abc", "12"]


def test_qwen_text_is_normalised():
    metadata = byte_level(pre="qwen2")
    assert tokens_of(metadata, "e\u0301") == tokens_of(metadata, "\u00e9")


def test_only_llama3_takes_whole_words_before_merging():
    unreachable = byte_level(merges=["ab c", "1 2"])
    assert tokens_of(unreachable, "ab") == ["a", "b"]
    assert tokens_of({**unreachable, "tokenizer.ggml.pre": "llama-bpe"}, "ab") == ["<s>", "ab"]


def test_the_file_decides_what_stands_around_a_text():
    tokenizer = tokenizer_from_gguf(byte_level(add_bos_token=True, add_eos_token=True))
    assert tokenizer.backend.encode("abc").tokens == ["<s>", "abc", "<end>"]
    assert tokenizer.encode("abc", add_special=False) == [257]


def test_ends_of_turns_are_ends_too():
    assert tokenizer_from_gguf(byte_level(eot_token_id=261)).eos_ids == (260, 261)
    assert tokenizer_from_gguf(byte_level(eot_token_id=260)).eos_ids == (260,)


def test_named_chat_templates_are_kept():
    metadata = byte_level()
    metadata["tokenizer.chat_template"] = "{{ bos_token }}plain"
    metadata["tokenizer.chat_template.tool_use"] = "with tools"
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.render([{"role": "user", "content": ""}]) == "<s>plain"
    assert tokenizer.render([{"role": "user", "content": ""}], tools=[{}]) == "with tools"


def test_padding_of_the_vocabulary_is_left_out():
    plain = byte_level()
    padded = {
        **plain,
        "tokenizer.ggml.tokens": [*plain["tokenizer.ggml.tokens"], "[PAD262]", "[PAD263]"],
        "tokenizer.ggml.token_type": [*plain["tokenizer.ggml.token_type"], 5, 5],
    }
    assert tokenizer_from_gguf(padded).vocab_size == 262
    assert tokenizer_from_gguf(padded).identity == tokenizer_from_gguf(plain).identity


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "t5"}, "^tokenizer.ggml.model: expected gpt2 or llama, got t5"),
        ({"pre": "tekken"}, "^tokenizer.ggml.pre: expected one of gpt-2, smollm, .* got tekken"),
        ({"merges": ["a b", "b z9"]}, "^tokenizer.ggml.merges: expected pairs of tokens"),
        (
            {"merges": ["ab"]},
            "^tokenizer.ggml.merges: expected two tokens with a space between them, got 'ab'",
        ),
        ({"token_type": [1]}, "^tokenizer.ggml.tokens: expected as many types .* 262 tokens, 1 types"),
        ({"tokens": ["a"] * 262}, "^tokenizer.ggml.tokens: expected distinct tokens, got 261 twice"),
        (
            {"eos_token_id": 300},
            "^tokenizer.ggml.eos_token_id: expected the id of one of 262 tokens, got 300",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_damaged_or_unknown_metadata_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        tokenizer_from_gguf(byte_level(**change))


@pytest.mark.parametrize("key", ["model", "pre", "tokens", "merges"])
def test_a_missing_key_is_named(key):
    metadata = byte_level()
    del metadata[f"tokenizer.ggml.{key}"]
    with pytest.raises(ValueError, match=f"^tokenizer.ggml.{key}: expected in the file's metadata, got none"):
        tokenizer_from_gguf(metadata)
