"""The tokenizer of a Hugging Face model folder."""

import logging
from pathlib import Path
from typing import Any

from jspec.text.tokenizer import Tokenizer

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "vocab.json")


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    """Loads a folder's tokenizer through transformers, from local files alone and without foreign code.

    Args:
      folder: holds tokenizer.json (or another format that transformers turns into it) and, if the model
        chats, its chat template.

    Raises:
      FileNotFoundError: no such folder, or none of a tokenizer's files in it.
      ValueError: transformers cannot read it, or reads it without the `tokenizers` library.
    """
    folder = Path(folder)
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise FileNotFoundError(
            f"folder: expected a tokenizer in {folder} ({', '.join(_TOKENIZER_FILES)}), got none of them; "
            "add them or pass token ids instead of text"
        )
    loaded = _load_quietly(folder)
    backend = getattr(loaded, "backend_tokenizer", None)
    if backend is None:
        raise ValueError(
            f"folder: expected a tokenizer that the tokenizers library runs, got {type(loaded).__name__} in "
            f"{folder}; convert it to tokenizer.json or pass token ids instead of text"
        )
    backend.no_truncation()  # tokenizer.json may carry both; a prompt is never cut or padded in silence
    backend.no_padding()
    templates = loaded.chat_template or {}
    return Tokenizer(
        backend=backend,
        chat_templates={"default": templates} if isinstance(templates, str) else dict(templates),
        special_tokens={
            name: str(token) for name, token in loaded.special_tokens_map.items() if isinstance(token, str)
        },
        bos_id=loaded.bos_token_id,
        eos_ids=() if loaded.eos_token_id is None else (loaded.eos_token_id,),
    )


def _load_quietly(folder: Path) -> Any:
    log = logging.getLogger("transformers")
    log.disabled = True  # at import it says that torch is missing: here that is as intended
    try:
        import transformers
    finally:
        log.disabled = False
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever a broken file raises, the reader needs to know which folder
        raise ValueError(
            f"folder: expected a tokenizer that transformers can read, got {folder}: "
            f"{type(error).__name__}: {error}"
        ) from error
