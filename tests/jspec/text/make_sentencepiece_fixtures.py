"""Makes data/sentencepiece_*.json: two small vocabularies, and what SentencePiece itself makes of texts.

Run from the repository root, with sentencepiece installed (the tests do not need it):
    python tests/jspec/text/make_sentencepiece_fixtures.py
"""

import json
import tempfile
from pathlib import Path

import sentencepiece

DATA = Path(__file__).parent / "data"
WORDS = (
    "Zürich naïve 東京 日本語 Привет мир שלום 한국어 😀 x² 1234 def return self.tokens == != {} <b>bold</b>"
)
TEXTS = [
    "",
    " ",
    "a",
    " a",
    "two  spaces   and more     of them ",
    "Hello world",
    "The tokens of a round, 1234 in all.",
    "def push(self, ids):\n    return ids\n\n\n",
    "tab\tand\r\nline",
    "naïve Zürich, 東京 😀 \U0001f1e9\U0001f1ea e\u0301",
    "<b>bold</b> and <b>again</b>",
    "aaaaaaaa bbbbbbbbb ababababab",
]
USER_DEFINED = ["\n", "\n\n", "▁▁", "▁▁▁", "<b>", "</b>"]
COMMON = dict(
    model_type="bpe",
    byte_fallback=True,
    normalization_rule_name="identity",
    remove_extra_whitespaces=False,
    allow_whitespace_only_pieces=True,
    split_digits=True,
    vocab_size=480,
    minloglevel=2,
)
KINDS = {
    "llama": dict(add_dummy_prefix=True),
    "gemma": dict(
        add_dummy_prefix=False,
        user_defined_symbols=USER_DEFINED,
        control_symbols=["<start_of_turn>", "<end_of_turn>"],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
    ),
}


def metadata(model: sentencepiece.SentencePieceProcessor, space_prefix: bool) -> dict:
    """The keys that a converter to GGUF writes."""
    pieces = [model.id_to_piece(i) for i in range(model.vocab_size())]
    types = []
    for i, piece in enumerate(pieces):
        if model.is_unknown(i):
            types.append(2)
        elif model.is_control(i):
            types.append(3)
        elif model.is_byte(i):
            types.append(6)
        else:
            types.append(4 if piece in USER_DEFINED and not space_prefix else 1)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": pieces,
        "tokenizer.ggml.scores": [model.get_score(i) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.bos_token_id": model.bos_id(),
        "tokenizer.ggml.eos_token_id": model.eos_id(),
        "tokenizer.ggml.unknown_token_id": model.unk_id(),
        "tokenizer.ggml.add_space_prefix": space_prefix,
    }


def main() -> None:
    """Writes both files."""
    sources = [path.read_text() for path in sorted(Path("jspec").rglob("*.py"))]
    lines = [line for text in [*sources, *[WORDS] * 20] for line in text.splitlines() if line.strip()]
    with tempfile.TemporaryDirectory() as folder:
        corpus = Path(folder) / "corpus.txt"
        corpus.write_text("\n".join(lines))
        for name, options in KINDS.items():
            prefix = str(Path(folder) / name)
            sentencepiece.SentencePieceTrainer.train(
                input=str(corpus), model_prefix=prefix, **COMMON, **options
            )
            model = sentencepiece.SentencePieceProcessor(model_file=prefix + ".model")
            cases = [{"text": text, "ids": model.encode(text)} for text in TEXTS]
            content = {"metadata": metadata(model, name == "llama"), "cases": cases}
            (DATA / f"sentencepiece_{name}.json").write_text(json.dumps(content, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
