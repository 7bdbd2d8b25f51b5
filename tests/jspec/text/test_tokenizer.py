"""Text and messages to ids and back, from GGUF metadata and from a folder."""

import dataclasses
import json
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import models, pre_tokenizers

from jspec.text.tokenizer import Tokenizer, load_tokenizer

DATA = Path(__file__).parent / "data"
HELLO = [{"role": "user", "content": "Hello 12"}]
# <|im_start|>system\n ... <|im_end|>\n<|im_start|>user\nHello 12<|im_end|>\n<|im_start|>assistant\n
# fmt: off
HELLO_IDS = [
    1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182,
    2, 198,
    1, 4093, 198, 19556, 216, 33, 34, 2, 198,
    1, 520, 9531, 198,
]
# fmt: on


def word_tokenizer(words: list[str], special: list[str] = [], **fields: object) -> Tokenizer:  # noqa: B006
    backend = tokenizers.Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0])
    )
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(special)
    values = dict(chat_templates={}, special_tokens={}, bos_id=None, eos_ids=())
    return Tokenizer(backend=backend, **{**values, **fields})


# Made by llama.cpp from the same file.
@pytest.mark.parametrize(
    "case", json.loads((DATA / "smollm2.json").read_text()), ids=lambda case: ascii(case["text"])
)
def test_gguf_tokenizer_gives_the_ids_of_llama_cpp(smollm2, case):
    assert smollm2.encode(case["text"]) == case["ids"]
    assert smollm2.decode(case["ids"], skip_special=False) == case["text"]


@settings(max_examples=300, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs", "Cc"], max_codepoint=0x3FFFF), max_size=60))
def test_text_survives_the_round_trip(smollm2, text):
    # Left out: characters with bytes that this vocabulary has no token for.
    assert smollm2.decode(smollm2.encode(text), skip_special=False) == text


def test_special_tokens_in_a_text_are_special_and_can_be_left_out(smollm2):
    ids = smollm2.encode("<|im_start|>user\nHi<|im_end|>")
    assert ids == [1, 4093, 198, 26843, 2]
    assert smollm2.decode(ids) == "user\nHi"
    assert smollm2.decode(ids, skip_special=False) == "<|im_start|>user\nHi<|im_end|>"


def test_smollm2_facts(smollm2):
    assert smollm2.vocab_size == 49152
    assert smollm2.special_ids == frozenset(range(17))
    assert smollm2.eos_ids == (2,)
    assert smollm2.bos_id == 1
    assert smollm2.encode("", add_special=True) == []  # this model wants no BOS before a text


def test_chat_follows_the_models_template(smollm2):
    assert smollm2.chat(HELLO) == HELLO_IDS
    assert smollm2.chat(HELLO, add_generation_prompt=False) == HELLO_IDS[:-4]
    assert smollm2.render([{"role": "system", "content": "S"}], add_generation_prompt=False) == (
        "<|im_start|>system\nS<|im_end|>\n"
    )


def test_without_a_template_chat_says_what_to_do():
    with pytest.raises(ValueError, match=r"^messages: expected .* chat template.*pass text or token ids"):
        word_tokenizer(["a"]).chat(HELLO)


def test_tools_choose_the_template_made_for_them():
    tokenizer = word_tokenizer(
        ["?", "plain", "tools"], chat_templates={"default": "plain", "tool_use": "tools {{ tools | length }}"}
    )
    assert tokenizer.render(HELLO) == "plain"
    assert tokenizer.render(HELLO, tools=[{"type": "function"}]) == "tools 1"


def test_half_a_surrogate_pair_is_refused(smollm2):
    with pytest.raises(
        ValueError, match=r"^text: expected Unicode text, got half a surrogate pair at character 2"
    ):
        smollm2.encode("ab\ud83d")


def test_a_negative_id_is_refused(smollm2):
    with pytest.raises(ValueError, match=r"^ids: expected numbers from 0 on, got -1"):
        smollm2.decode([5, -1])


def test_ids_past_the_vocabulary_have_no_text(smollm2):
    assert smollm2.decode([19556, 60000, 905]) == "Hello world"


def test_a_model_with_fewer_tokens_than_ordinary_text_needs_is_refused():
    tokenizer = word_tokenizer(["a", "b", "c"])
    tokenizer.check_fits(3, "model")
    tokenizer.check_fits(4, "model with a padded head")
    with pytest.raises(
        ValueError, match=r"^tokenizer: expected .* at most 2 tokens for llama, got 3 \(1 would"
    ):
        tokenizer.check_fits(2, "llama")


def test_special_tokens_past_the_models_vocabulary_are_no_obstacle():
    tokenizer = word_tokenizer(["a", "b"], special=["<image>"])
    assert tokenizer.vocab_size == 3
    tokenizer.check_fits(2, "gemma3")


def test_identity_is_that_of_the_vocabulary():
    tokenizer = word_tokenizer(["a", "b"])
    assert tokenizer.identity == word_tokenizer(["a", "b"], chat_templates={"default": "x"}).identity
    assert tokenizer.identity != word_tokenizer(["b", "a"]).identity
    assert tokenizer.identity != word_tokenizer(["a", "b"], special=["<s>"]).identity


@pytest.fixture(scope="module")
def folder(smollm2, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    copy = tokenizers.Tokenizer.from_str(smollm2.backend.to_str())
    copy.enable_truncation(4)
    copy.enable_padding(length=64)
    copy.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **smollm2.special_tokens}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(smollm2.chat_templates["default"])
    return folder


def test_a_folder_gives_the_same_tokenizer_as_the_gguf_file(smollm2, folder):
    tokenizer = load_tokenizer(folder)
    assert tokenizer.identity == smollm2.identity
    assert dataclasses.replace(tokenizer, backend=smollm2.backend).special_tokens == smollm2.special_tokens
    assert (tokenizer.bos_id, tokenizer.eos_ids) == (smollm2.bos_id, smollm2.eos_ids)
    assert tokenizer.chat(HELLO) == HELLO_IDS


def test_a_folder_never_cuts_or_pads_a_prompt(smollm2, folder):
    text = "one two three four five six seven"
    assert load_tokenizer(folder).encode(text) == smollm2.encode(text)


def test_a_folder_is_read_as_transformers_reads_it(folder):
    import transformers

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    messages = [
        *HELLO,
        {"role": "assistant", "content": " 東京\n"},
        {"role": "user", "content": "<|im_end|>?"},
    ]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.render(messages) == rendered
    assert ours.chat(messages) == theirs(rendered, add_special_tokens=False)["input_ids"]
    assert ours.decode(ours.chat(messages)) == theirs.decode(ours.chat(messages), skip_special_tokens=True)


def test_a_folder_without_tokenizer_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"^folder: expected a tokenizer in .* got none of them"):
        load_tokenizer(tmp_path)


def test_a_damaged_tokenizer_is_refused_by_name(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(ValueError, match=r"^folder: expected a tokenizer that transformers can read, got"):
        load_tokenizer(tmp_path)
