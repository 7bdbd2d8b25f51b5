import json

import numpy as np
import pytest

from jspec.checkpoints.draft_vocabulary import (
    VOCABULARY_FILE,
    DraftVocabulary,
    check_vocabulary_file,
    read_draft_vocabulary,
)


def vocabulary(**changes):
    return DraftVocabulary(
        **{"ids": (1, 4, 7), "vocab_size": 9, "tokenizer": "words", "data": "texts"} | changes
    )


def test_it_is_read_back(tmp_path):
    assert read_draft_vocabulary(tmp_path) is None
    (tmp_path / VOCABULARY_FILE).write_text(vocabulary().json())
    assert read_draft_vocabulary(tmp_path) == vocabulary()


def test_the_key_is_of_what_the_ids_are_counted_on():
    others = [
        vocabulary(**c) for c in ({"data": "b"}, {"tokenizer": "b"}, {"vocab_size": 10}, {"ids": (1, 4)})
    ]
    assert len({v.key for v in (vocabulary(), *others)}) == 5
    assert vocabulary(ids=(0, 4, 7)).key == vocabulary().key  # equal keys: the ids follow


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ((1, 4, 9), "expected ids from 0 to 8, got 9 at column 2"),
        ((1, 1, 7), "expected ascending ids without repetition, got 1 after 1 at column 1"),
        ((4, 1, 7), "got 1 after 4 at column 1"),
        ((-1, 1, 7), "got -1 at column 0"),
    ],
)
def test_ids_that_are_no_vocabulary_are_refused(ids, message):
    with pytest.raises(ValueError, match=message):
        vocabulary(ids=ids)


@pytest.mark.parametrize(
    ("ids", "vocab_size", "message"),
    [
        ((1, 4), 9, "expected 3 draft ids, as draft_vocabulary.json says, got 2"),
        ((1, 5, 7), 9, "expected draft id 4 at column 1, as draft_vocabulary.json says, got 5"),
        ((1, 4, 7), 8, "expected a drafter for a vocabulary of 9, as draft_vocabulary.json says, got 8"),
    ],
)
def test_weights_of_another_vocabulary_are_refused(tmp_path, ids, vocab_size, message):
    (tmp_path / VOCABULARY_FILE).write_text(vocabulary().json())
    check_vocabulary_file(tmp_path, np.array([1, 4, 7]), 9)
    with pytest.raises(ValueError, match=message):
        check_vocabulary_file(tmp_path, np.array(ids), vocab_size)


def test_a_file_that_was_changed_or_is_another_is_refused(tmp_path):
    values = json.loads(vocabulary().json())
    (tmp_path / VOCABULARY_FILE).write_text(json.dumps(values | {"tokenizer": "other"}))
    with pytest.raises(ValueError, match=r"expected the key .* of its own contents"):
        read_draft_vocabulary(tmp_path)
    (tmp_path / VOCABULARY_FILE).write_text("{}")
    with pytest.raises(ValueError, match="expected a draft vocabulary, got another file"):
        read_draft_vocabulary(tmp_path)


def test_another_tokenizer_is_refused():
    vocabulary().check_tokenizer("words")
    with pytest.raises(ValueError, match="expected the tokenizer words, whose ids were counted, got other"):
        vocabulary().check_tokenizer("other")
