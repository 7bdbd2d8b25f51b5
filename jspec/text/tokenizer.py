"""One tokenizer, whatever file it came from: text and chat messages to token ids, and back."""

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, SupportsIndex

import tokenizers

from jspec.text.chat import render_chat
from jspec.text.spelling import Spelling, spelling_of


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Tokenizer:
    """A `tokenizers` pipeline with what a language model adds to it.

    Special tokens spelled out in a text or message are read as special tokens, as in transformers: whoever
    passes on foreign text decides beforehand whether "<|im_end|>" may stand in it.
    """

    backend: tokenizers.Tokenizer
    chat_templates: Mapping[str, str]  # by name: "default", "tool_use", ...; empty if the model has none
    special_tokens: Mapping[
        str, str
    ]  # by the name under which templates read them: bos_token, eos_token, ...
    bos_id: int | None
    eos_ids: tuple[
        int, ...
    ]  # ends of text that the tokenizer knows; the model's configuration may name others

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Token ids of a text.

        A byte-level vocabulary may lack some bytes (SmolLM2's has no 0xF1, for instance): transformers,
        llama.cpp and this function leave them out.

        Args:
          text: any text; an empty one has no tokens of its own.
          add_special: whether to add what the model expects around a text, usually its BOS; not for
            rendered chats, whose template writes it.

        Raises:
          ValueError: the text holds half of a surrogate pair, which has no UTF-8.
        """
        try:
            return self.backend.encode(text, add_special_tokens=add_special).ids
        except TypeError as error:
            half = next((i for i, character in enumerate(text) if "\ud800" <= character <= "\udfff"), None)
            if half is None:
                raise
            raise ValueError(
                f"text: expected Unicode text, got half a surrogate pair at character {half}; "
                "decode the text from its bytes again"
            ) from error

    def decode(self, ids: Iterable[SupportsIndex], *, skip_special: bool = True) -> str:
        """Text of token ids: what a `Detokenizer` makes of them in any grouping.

        Raises:
          ValueError: an id is negative.
        """
        from jspec.text.detokenize import Detokenizer  # it builds on this module

        detokenizer = Detokenizer(self, skip_special=skip_special)
        return detokenizer.push(ids) + detokenizer.flush()

    def chat(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> list[int]:
        """Token ids of chat messages, up to where the assistant's answer begins.

        Args:
          messages: each with "role" and "content".
          **template_arguments: as in `render`.

        Raises:
          ValueError: as in `render`.
        """
        return self.encode(self.render(messages, **template_arguments), add_special=False)

    def render(self, messages: Sequence[Mapping[str, Any]], **template_arguments: Any) -> str:
        """The text that the model's own chat template makes of messages.

        Args:
          messages: each with "role" and "content".
          **template_arguments: tools, documents, add_generation_prompt (default True) and whatever else
            this template reads, such as enable_thinking.

        Raises:
          ValueError: the model has no chat template, or it refuses the messages (see `render_chat`).
        """
        name = (
            "tool_use" if template_arguments.get("tools") and "tool_use" in self.chat_templates else "default"
        )
        if name not in self.chat_templates:
            raise ValueError(
                "messages: expected a tokenizer with a default chat template, got one with "
                f"{list(self.chat_templates) or 'none'}; pass text or token ids"
            )
        return render_chat(
            self.chat_templates[name], messages, **{**self.special_tokens, **template_arguments}
        )

    @functools.cached_property
    def vocab_size(self) -> int:
        """The number of ids, added tokens included: the greatest one, plus one."""
        return 1 + max(self.backend.get_vocab(with_added_tokens=True).values())

    @functools.cached_property
    def special_ids(self) -> frozenset[int]:
        """Ids that steer the model and are no text, such as BOS and the ends of turns."""
        added = self.backend.get_added_tokens_decoder()
        return frozenset(id_ for id_, token in added.items() if token.special)

    @functools.cached_property
    def identity(self) -> str:
        """SHA-256 of the vocabulary: equal for tokenizers whose ids mean the same tokens."""
        vocabulary = self.backend.get_vocab(with_added_tokens=True)
        lines = sorted(f"{id_:08d} {token}\n" for token, id_ in vocabulary.items())
        return hashlib.sha256("".join(lines).encode()).hexdigest()

    def check_fits(self, vocab_size: int, model: str) -> None:
        """Refuses a model whose vocabulary lacks tokens that ordinary text may contain.

        A model with more ids than the tokenizer is fine (a padded head). So are special tokens past the
        model's vocabulary, which only a text that spells them out can produce (Gemma 3's text models come
        with one for images).

        Args:
          vocab_size: rows of the model's embedding.
          model: what to call the model in the message.

        Raises:
          ValueError: an ordinary token has an id of `vocab_size` or more.
        """
        ids = self.backend.get_vocab(with_added_tokens=True).values()
        missing = sum(id_ >= vocab_size and id_ not in self.special_ids for id_ in ids)
        if missing:
            raise ValueError(
                f"tokenizer: expected a vocabulary of at most {vocab_size} tokens for {model}, got "
                f"{self.vocab_size} ({missing} would have no embedding); use the tokenizer of that model"
            )

    @functools.cached_property
    def spelling(self) -> Spelling | None:
        """The bytes of each token; None if the decoder works on words.

        Raises:
          ValueError: see `spelling_of`.
        """
        return spelling_of(self.backend)


def load_tokenizer(path: str | Path) -> Tokenizer:
    """The tokenizer of a model.

    Args:
      path: a Hugging Face folder or a .gguf file.

    Raises:
      FileNotFoundError, ValueError: see `tokenizer_from_folder` and `tokenizer_from_gguf`.
    """
    path = Path(path)
    # Imported on use: both kinds build on this module.
    if path.suffix == ".gguf" and path.is_file():
        from jspec.checkpoints.gguf_metadata import read_gguf_metadata
        from jspec.checkpoints.gguf_tokenizer import tokenizer_from_gguf

        return tokenizer_from_gguf(read_gguf_metadata(path))
    from jspec.text.folder import tokenizer_from_folder

    return tokenizer_from_folder(path)
