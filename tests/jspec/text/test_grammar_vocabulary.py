"""What grammars are told of real tokenizers."""

import llguidance
import pytest

from jspec.grammar.compiler import GrammarCompiler
from jspec.grammar.grammar import Grammar
from jspec.grammar.vocabulary import Vocabulary

SAID = '{"name": "Zoë", "tags": ["a b", ""], "n": -1}'
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "n": {"type": "integer"},
    },
    "required": ["name", "tags", "n"],
    "additionalProperties": False,
}


def follow(compiler, tokenizer, text: str) -> bool:
    """Whether the tokens of a text are allowed one after the other, and complete the schema."""
    matcher = compiler.matcher(Grammar(json_schema=SCHEMA))
    for id_ in tokenizer.encode(text, add_special=False):
        if not matcher.allowed()[id_ // 32] >> id_ % 32 & 1:
            return False
        matcher.accept(id_)
    return matcher.complete


def test_smollm2s_tokens_are_read_as_llguidance_itself_reads_them(smollm2):
    ours = Vocabulary(smollm2, smollm2.vocab_size, smollm2.eos_ids).llguidance()
    theirs = llguidance.LLTokenizer(smollm2.backend.to_str(), eos_token=list(smollm2.eos_ids))
    assert ours.vocab_size == theirs.vocab_size == smollm2.vocab_size
    for id_ in range(smollm2.vocab_size):
        assert ours.decode_bytes([id_]) == theirs.decode_bytes([id_])
        assert ours.is_special_token(id_) == theirs.is_special_token(id_)
    assert ours.tokenize_str(SAID) == theirs.tokenize_str(SAID) == smollm2.encode(SAID, add_special=False)


def test_text_as_the_tokenizer_writes_it_is_allowed(smollm2):
    compiler = GrammarCompiler(smollm2, smollm2.vocab_size, smollm2.eos_ids)
    assert follow(compiler, smollm2, SAID)
    assert not follow(compiler, smollm2, SAID.replace("-1", '"1"'))


def test_prescribed_text_inside_of_a_text_has_no_space_before_it(sentencepiece):
    vocabulary = Vocabulary(sentencepiece, sentencepiece.vocab_size, sentencepiece.eos_ids)
    for text in ("a", "ab", "the a", " a"):
        ids = vocabulary(text)
        assert ids and vocabulary.spelled(ids) == text.encode()


@pytest.mark.parametrize("text", ["a", "the", " a"])
def test_sentencepiece_tokens_spell_what_results_spell(sentencepiece, text):
    compiler = GrammarCompiler(sentencepiece, sentencepiece.vocab_size, sentencepiece.eos_ids)
    matcher, ids = compiler.matcher(Grammar(regex=f"x{text}")), []
    while not matcher.complete:
        bits = matcher.allowed()
        ids.append(next(i for i in range(sentencepiece.vocab_size) if bits[i // 32] >> i % 32 & 1))
        matcher.accept(ids[-1])
    assert sentencepiece.decode(ids) == f"x{text}"
