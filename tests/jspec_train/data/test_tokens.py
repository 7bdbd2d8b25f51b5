import numpy as np
import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from jspec.text.tokenizer import Tokenizer
from jspec_train.data.tokens import tokenise, tokenise_whole


def spelled(tokenizer, tokens):
    return [
        tokenizer.backend.id_to_token(int(id_)) + ("*" if mask else "")
        for id_, mask in zip(tokens.ids, tokens.loss_mask, strict=True)
    ]


def test_the_tokens_of_an_answer_are_trained_on(tiny):
    text = "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\nHello there<|im_end|>\n"
    start = text.index("Hello there")
    tokens = tokenise(tiny, text, [(start, len(text) - 1)])
    assert [token for token in spelled(tiny, tokens) if token.endswith("*")] == [
        "Hello*",
        "Ġthere*",
        "<|im_end|>*",
    ]
    assert tokens.ids.tolist() == tiny.encode(text, add_special=False)
    assert tokens.exact


def test_prompts_keep_the_ids_that_a_server_sends(tiny):
    # "Ċ" and two spaces are one token of this vocabulary.
    text = "<|im_start|>assistant\n   Paris.<|im_end|>"
    start = len("<|im_start|>assistant\n")
    whole = tokenise_whole(tiny, text, [(start, len(text))])
    assert not whole.exact
    assert spelled(tiny, whole) == [
        "<|im_start|>",
        "a",
        "ssis",
        "tant",
        "ĊĠĠ",
        "ĠPar*",
        "is*",
        ".*",
        "<|im_end|>*",
    ]
    parted = tokenise(tiny, text, [(start, len(text))])
    assert parted.exact
    assert spelled(tiny, parted)[4:] == ["Ċ", "ĠĠ*", "ĠPar*", "is*", ".*", "<|im_end|>*"]
    assert parted.ids[:5].tolist() == tiny.encode(text[:start], add_special=False)


def test_several_answers_in_pieces(tiny):
    text = "<|im_start|>a\n   b<|im_end|><|im_start|>a\n   c<|im_end|>"
    answers = [(14, 28), (42, 56)]
    assert [text[start:end] for start, end in answers] == ["   b<|im_end|>", "   c<|im_end|>"]
    tokens = tokenise(tiny, text, answers)
    assert [token for token in spelled(tiny, tokens) if token.endswith("*")] == [
        "ĠĠ*",
        "Ġb*",
        "<|im_end|>*",
        "ĠĠ*",
        "Ġc*",
        "<|im_end|>*",
    ]
    assert tiny.decode(tokens.ids, skip_special=False) == text


def test_a_tokenizer_that_changes_pieces_encodes_in_one(tiny):
    vocabulary = {"▁a": 0, "▁b": 1, "▁": 2, "a": 3, "b": 4, "ab": 5, "▁ab": 6}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("a", "b"), ("▁", "a"), ("▁", "b"), ("▁", "ab")]))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    tokenizer = Tokenizer(backend=backend, chat_templates={}, special_tokens={}, bos_id=None, eos_ids=())
    tokens = tokenise(tokenizer, "ab", [(1, 2)])
    assert tokens.ids.tolist() == [6] and not tokens.exact  # pieces would be "▁a", "▁b": other text
    assert not tokens.loss_mask.any()


def test_half_a_surrogate_pair_is_named(tiny):
    with pytest.raises(ValueError, match="got half a surrogate pair at character 2"):
        tokenise(tiny, "ab\ud83d", [(0, 2)])


@pytest.mark.parametrize("seed", range(3))
def test_counting_from_the_last_special_token_is_counting_from_the_beginning(tiny, seed):
    words = ["<|im_start|>", "<|im_end|>", "\n", "  ", "Hello", " there", "日", "é", "2 + 2", "<think>"]
    random = np.random.default_rng(seed)
    for _ in range(50):
        text = "".join(random.choice(words, size=12))
        start, end = sorted(random.integers(0, len(text) + 1, 2).tolist())
        tokens = tokenise_whole(tiny, text, [(start, end)])
        first, last = (len(tiny.encode(text[:cut], add_special=False)) for cut in (start, end))
        expected = np.zeros(tokens.ids.size, bool)
        expected[first:last] = True
        assert tokens.loss_mask.tolist() == expected.tolist()
