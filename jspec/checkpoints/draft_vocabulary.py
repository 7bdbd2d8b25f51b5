"""The ids that a drafter of a reduced vocabulary drafts, and what they were counted on.

A file beside the weights keeps both, because ids of another corpus, tokenizer or size fit the same shapes.
"""

import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np

VOCABULARY_FILE = "draft_vocabulary.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftVocabulary:
    """Ascending target ids, and their origin."""

    ids: tuple[int, ...]
    vocab_size: int  # of the target
    tokenizer: str  # identity
    data: str  # hash of the samples that were counted

    def __post_init__(self) -> None:
        """Refuses what is no vocabulary.

        Raises:
          ValueError: ids that are repeated, not in order or out of range.
        """
        check_ids(np.asarray(self.ids), self.vocab_size, "draft vocabulary")

    @property
    def key(self) -> str:
        """Hash of everything that decides the ids: equal keys have equal ids."""
        return vocabulary_key(self.data, self.tokenizer, self.vocab_size, len(self.ids))

    def check_same(self, ids: np.ndarray, vocab_size: int, where: str) -> None:
        """Refuses weights of another vocabulary.

        Raises:
          ValueError: naming the first difference.
        """
        if vocab_size != self.vocab_size:
            raise ValueError(
                f"{where}: expected a drafter for a vocabulary of {self.vocab_size}, as {VOCABULARY_FILE} says, got "
                f"{vocab_size}; the folder holds files of two drafters: export it again"
            )
        if len(ids) != len(self.ids):
            raise ValueError(
                f"{where}: expected {len(self.ids)} draft ids, as {VOCABULARY_FILE} says, got {len(ids)}; "
                "the folder holds files of two drafters: export it again"
            )
        other = np.flatnonzero(np.asarray(ids) != np.asarray(self.ids))
        if other.size:
            at = int(other[0])
            raise ValueError(
                f"{where}: expected draft id {self.ids[at]} at column {at}, as {VOCABULARY_FILE} says, got "
                f"{int(ids[at])}; the folder holds files of two drafters: export it again"
            )

    def check_tokenizer(self, identity: str) -> None:
        """Refuses another tokenizer than the one whose ids were counted.

        Raises:
          ValueError: naming both.
        """
        if identity != self.tokenizer:
            raise ValueError(
                f"{VOCABULARY_FILE}: expected the tokenizer {self.tokenizer[:12]}, whose ids were counted, got "
                f"{identity[:12]}; use the target that the drafter was trained for"
            )

    def json(self) -> str:
        """The text of the file."""
        return json.dumps(
            {
                "key": self.key,
                "data": self.data,
                "tokenizer": self.tokenizer,
                "vocab_size": self.vocab_size,
                "size": len(self.ids),
                "ids": list(self.ids),
            }
        )


def vocabulary_key(data: str, tokenizer: str, vocab_size: int, size: int) -> str:
    """Hash of what a draft vocabulary is counted on: samples, tokenizer and both sizes."""
    text = json.dumps([data, tokenizer, vocab_size, size])
    return hashlib.sha256(text.encode()).hexdigest()


def check_ids(ids: np.ndarray, vocab_size: int, where: str) -> None:
    """Refuses ids that are repeated, not ascending or outside the target's vocabulary.

    Raises:
      ValueError: naming the first one.
    """
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if wrong.size:
        at = int(wrong[0])
        raise ValueError(
            f"{where}: expected ids from 0 to {vocab_size - 1}, got {int(ids[at])} at column {at}; "
            "the file is damaged"
        )
    falling = np.flatnonzero(np.diff(ids) <= 0)
    if falling.size:
        at = int(falling[0]) + 1
        raise ValueError(
            f"{where}: expected ascending ids without repetition, got {int(ids[at])} after {int(ids[at - 1])} "
            f"at column {at}; the file is damaged"
        )


def read_draft_vocabulary(folder: Path) -> DraftVocabulary | None:
    """The vocabulary kept in a folder; None if it has none.

    Raises:
      ValueError: the file is none, or was changed after it was written.
    """
    path = folder / VOCABULARY_FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text("utf-8"))
        vocabulary = DraftVocabulary(
            ids=tuple(int(i) for i in values["ids"]),
            vocab_size=int(values["vocab_size"]),
            tokenizer=values["tokenizer"],
            data=values["data"],
        )
        key = values["key"]
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(
            f"{path}: expected a draft vocabulary, got another file ({problem}); export the drafter again"
        ) from problem
    if key != vocabulary.key:
        raise ValueError(
            f"{path}: expected the key {vocabulary.key[:12]} of its own contents, got {str(key)[:12]}; the file was "
            "changed: export the drafter again"
        )
    return vocabulary


def check_vocabulary_file(folder: Path, ids: np.ndarray, vocab_size: int) -> None:
    """Holds the ids in a folder's weights against the file beside them, where there is one.

    Raises:
      ValueError: the file is none, or has other ids.
    """
    vocabulary = read_draft_vocabulary(folder)
    if vocabulary is not None:
        vocabulary.check_same(ids, vocab_size, str(folder))
