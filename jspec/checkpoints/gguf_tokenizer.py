"""The tokenizer that a GGUF file carries in its metadata."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jspec.text.spelling import SPACE_MARK
from jspec.text.tokenizer import Tokenizer

# Values of tokenizer.ggml.token_type that matter here.
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Split:
    """How a family of byte-level tokenizers cuts text into words before merging."""

    pattern: str | None  # None: GPT-2's own pattern
    single_digits: bool = False  # cut out every digit first
    nfc: bool = False  # normalise to NFC first
    whole_words: bool = False  # a word that is a token is not merged up from bytes
    adds_bos: bool = False  # unless the file says otherwise


def _word_pattern(digits: str) -> str:
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_LLAMA3 = _Split(pattern=_word_pattern(r"\p{N}{1,3}"), whole_words=True, adds_bos=True)

# By tokenizer.ggml.pre.
_SPLITS = {
    "gpt-2": _Split(pattern=None),
    "smollm": _Split(pattern=None, single_digits=True),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _Split(pattern=_word_pattern(r"\p{N}"), nfc=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Vocabulary:
    """Tokens with their ids and types, without the padding that converters put at the end."""

    ids: dict[str, int]
    types: list[int]

    def of_type(self, kind: int) -> list[str]:
        return [token for token, id_ in self.ids.items() if self.types[id_] == kind]


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """Rebuilds a file's tokenizer, chat templates included.

    Byte-level ("gpt2") and SentencePiece BPE ("llama") vocabularies are known. The ids are those of llama.cpp
    (compared over 900 texts for each kind), but that text for Qwen is normalised to NFC, as transformers
    does. For a SentencePiece vocabulary with a space before the text, transformers puts it at the start
    only, unless the text starts with one; llama.cpp and this function also put it after special tokens.

    Args:
      metadata: the file's keys as Python values (strings, numbers, lists); only "tokenizer.*" is read.

    Raises:
      ValueError: a key is missing or contradicts another, or the kind of tokenizer is not known here.

    Source: keys from the GGUF specification (ggml, docs/gguf.md); cutting into words from the models' own
    tokenizer.json; merges from scores as in transformers' conversion of SentencePiece models.
    """
    kind = _required(metadata, "tokenizer.ggml.model")
    vocabulary = _vocabulary(metadata)
    if kind == "gpt2":
        backend, adds_bos = _byte_level(metadata, vocabulary)
    elif kind == "llama":
        backend, adds_bos = _sentencepiece(metadata, vocabulary), True
    else:
        raise ValueError(
            f"tokenizer.ggml.model: expected gpt2 or llama, got {kind}; use the model's Hugging Face folder "
            "or pass token ids instead of text"
        )
    special_tokens = _special_tokens(metadata, vocabulary)
    _add_around_text(
        backend,
        bos=special_tokens.get("bos_token")
        if metadata.get("tokenizer.ggml.add_bos_token", adds_bos)
        else None,
        eos=special_tokens.get("eos_token") if metadata.get("tokenizer.ggml.add_eos_token", False) else None,
    )
    ends = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    return Tokenizer(
        backend=backend,
        chat_templates=_chat_templates(metadata),
        special_tokens=special_tokens,
        bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(id_ for id_ in ends if id_ is not None)),
    )


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, bool]:
    name = _required(metadata, "tokenizer.ggml.pre")
    if name not in _SPLITS:
        raise ValueError(
            f"tokenizer.ggml.pre: expected one of {', '.join(_SPLITS)}, got {name}; use the model's Hugging "
            "Face folder or pass token ids instead of text"
        )
    split = _SPLITS[name]
    merges = [_pair(merge) for merge in _required(metadata, "tokenizer.ggml.merges")]
    backend = _bpe(vocabulary, merges, ignore_merges=split.whole_words)
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = []
    if split.single_digits:
        steps.append(pre_tokenizers.Digits(individual_digits=True))
    if split.pattern is not None:
        steps.append(pre_tokenizers.Split(tokenizers.Regex(split.pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.pattern is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    _add_tokens(backend, vocabulary, normalized=False)
    return backend, split.adds_bos


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    backend = _bpe(
        vocabulary,
        _merges_from_scores(_required(metadata, "tokenizer.ggml.scores"), vocabulary),
        unk_token=None if unknown is None else _token(metadata, "unknown", vocabulary),
        fuse_unk=True,
        byte_fallback=True,
    )
    steps = [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefix:
        marked = [token for token in vocabulary.of_type(_USER_DEFINED) if SPACE_MARK in token]
        if marked:
            raise ValueError(
                f"tokenizer.ggml.add_space_prefix: expected false beside user-defined tokens with spaces "
                f"({marked[0]!r}), got true; use the model's Hugging Face folder"
            )
        mark = [normalizers.Prepend(SPACE_MARK), normalizers.Replace(" ", SPACE_MARK)]
        backend.normalizer = normalizers.Sequence(mark)
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        backend.normalizer = normalizers.Replace(" ", SPACE_MARK)
    backend.decoder = decoders.Sequence(steps)
    # Some user-defined tokens are runs of marks: they are found where spaces have become marks.
    _add_tokens(backend, vocabulary, normalized=not prefix)
    return backend


def _bpe(vocabulary: _Vocabulary, merges: list[tuple[str, str]], **options: Any) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer(models.BPE(vocab=vocabulary.ids, merges=merges, **options))
    except Exception as error:  # the library has no exception type of its own
        raise ValueError(
            f"tokenizer.ggml.merges: expected pairs of tokens that join to a token, got {error}; "
            "the file is damaged, download it again"
        ) from error


def _pair(merge: str) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise ValueError(
            f"tokenizer.ggml.merges: expected two tokens with a space between them, got {merge!r}; "
            "the file is damaged, download it again"
        )
    return left, right


def _merges_from_scores(scores: list[float], vocabulary: _Vocabulary) -> list[tuple[str, str]]:
    """Every way to put an ordinary token together from two, best score of the whole first.

    Equal scores: shorter left part first, then shorter right part, then the lower ids; SentencePiece itself
    would take the leftmost place in the text. Tokens that users defined are matched before merging.
    """
    ids = {token: vocabulary.ids[token] for token in vocabulary.of_type(_NORMAL)}
    pairs = [
        (-scores[id_], end, len(token) - end, ids[token[:end]], ids[token[end:]])
        for token, id_ in ids.items()
        for end in range(1, len(token))
        if token[:end] in ids and token[end:] in ids
    ]
    names = {id_: token for token, id_ in ids.items()}
    return [(names[left], names[right]) for *_, left, right in sorted(pairs)]


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = _required(metadata, "tokenizer.ggml.tokens")
    types = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    scores = metadata.get("tokenizer.ggml.scores", types)
    if not len(tokens) == len(types) == len(scores):
        raise ValueError(
            f"tokenizer.ggml.tokens: expected as many types and scores as tokens, got {len(tokens)} tokens, "
            f"{len(types)} types, {len(scores)} scores; the file is damaged"
        )
    kept = [
        (token, id_) for id_, token in enumerate(tokens) if types[id_] != _UNUSED or token != f"[PAD{id_}]"
    ]
    ids = dict(kept)
    if len(ids) != len(kept):
        raise ValueError(
            f"tokenizer.ggml.tokens: expected distinct tokens, got {len(kept) - len(ids)} twice; "
            "the file is damaged, download it again"
        )
    return _Vocabulary(ids=ids, types=types)


def _add_tokens(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, normalized: bool) -> None:
    """Makes control and user-defined tokens whole wherever their text occurs; they have ids already."""
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(token, special=True, normalized=False)
            for token in vocabulary.of_type(_CONTROL)
        ]
    )
    backend.add_tokens(
        [tokenizers.AddedToken(token, normalized=normalized) for token in vocabulary.of_type(_USER_DEFINED)]
    )


def _add_around_text(backend: tokenizers.Tokenizer, *, bos: str | None, eos: str | None) -> None:
    around = [token for token in (bos, eos) if token is not None]
    if around:
        backend.post_processor = processors.TemplateProcessing(
            single=[token for token in (bos, "$A", eos) if token is not None],
            special_tokens=[(token, backend.token_to_id(token)) for token in around],
        )


def _special_tokens(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, str]:
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    return {
        name: _token(metadata, key, vocabulary)
        for name, key in names.items()
        if metadata.get(f"tokenizer.ggml.{key}_token_id") is not None
    }


def _token(metadata: Mapping[str, Any], name: str, vocabulary: _Vocabulary) -> str:
    key = f"tokenizer.ggml.{name}_token_id"
    tokens = metadata["tokenizer.ggml.tokens"]
    id_ = metadata[key]
    if not 0 <= id_ < len(tokens) or tokens[id_] not in vocabulary.ids:
        raise ValueError(
            f"{key}: expected the id of one of {len(tokens)} tokens, got {id_}; the file is damaged"
        )
    return tokens[id_]


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    if "tokenizer.chat_template" in metadata:
        named["default"] = metadata["tokenizer.chat_template"]
    return named


def _required(metadata: Mapping[str, Any], key: str) -> Any:
    if key not in metadata:
        raise ValueError(
            f"{key}: expected in the file's metadata, got none; use a complete GGUF file or pass token ids "
            "instead of text"
        )
    return metadata[key]
