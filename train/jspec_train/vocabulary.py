"""Which ids a drafter drafts: those that the training data have the target say most often."""

from pathlib import Path

import numpy as np
from jaxtyping import Int

from jspec.checkpoints.draft_vocabulary import (
    VOCABULARY_FILE,
    DraftVocabulary,
    read_draft_vocabulary,
    vocabulary_key,
)
from jspec_train.data.batches import Samples
from jspec_train.samples import SampleSource


def supervised_counts(source: Samples, vocab_size: int) -> Int[np.ndarray, "vocabulary"]:
    """How often each id is trained on; all samples are read.

    Raises:
      ValueError: a sample has an id that the target does not.
    """
    counts = np.zeros(vocab_size, np.int64)
    for index in range(len(source)):
        sample = source[index]
        found = np.bincount(sample.ids[sample.loss_mask], minlength=vocab_size)
        if found.size > vocab_size:
            raise ValueError(
                f"sample {sample.id}: expected ids below {vocab_size}, the target's vocabulary, got {found.size - 1}; "
                "prepare the data with this target's tokenizer"
            )
        counts += found
    return counts


def most_frequent(counts: Int[np.ndarray, "vocabulary"], size: int) -> Int[np.ndarray, "drafted"]:
    """The `size` ids that occur most often, ascending; ties go to the lower id, also among unseen ones.

    Raises:
      ValueError: more ids than there are.

    Source: SpecForge a6b6b023, `process_token_dict_to_mappings`.
    """
    if not 1 <= size <= counts.size:
        raise ValueError(
            f"drafter.vocabulary: expected at most {counts.size} ids, the target's vocabulary, got {size}; lower it"
        )
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def draft_vocabulary(source: SampleSource, size: int, vocab_size: int, output: Path) -> DraftVocabulary:
    """The draft vocabulary of a run: counted, or as the run has it if data and sizes are still the same.

    Args:
      source: the training data.
      size: ids wanted.
      vocab_size: of the target.
      output: folder of the run; see `keep_draft_vocabulary`.

    Raises:
      ValueError: more ids than the target has, or the run was begun with other data, tokenizer or sizes.
    """
    data, tokenizer = source.counts.content, source.header.tokenizer
    kept = read_draft_vocabulary(output)
    if kept is not None:
        wanted = {"data": data, "tokenizer": tokenizer, "vocab_size": vocab_size, "size": size}
        held = {
            "data": kept.data,
            "tokenizer": kept.tokenizer,
            "vocab_size": kept.vocab_size,
            "size": len(kept.ids),
        }
        for name, value in wanted.items():
            if held[name] != value:
                raise ValueError(
                    f"drafter.vocabulary: expected the {name} {_short(held[name])} that "
                    f"{output / VOCABULARY_FILE} was counted on, got {_short(value)}; use what the run was begun with, "
                    "or another output"
                )
        assert kept.key == vocabulary_key(data, tokenizer, vocab_size, size)
        return kept
    ids = most_frequent(supervised_counts(source, vocab_size), size)
    return DraftVocabulary(
        ids=tuple(int(i) for i in ids), vocab_size=vocab_size, tokenizer=tokenizer, data=data
    )


def keep_draft_vocabulary(vocabulary: DraftVocabulary, output: Path) -> None:
    """Writes it into a run's folder, where it is not counted again."""
    (output / VOCABULARY_FILE).write_text(vocabulary.json(), encoding="utf-8")


def _short(value: object) -> str:
    return value[:12] if isinstance(value, str) else str(value)
