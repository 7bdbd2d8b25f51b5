import numpy as np
import pytest

from jspec_train.sample import Sample
from jspec_train.vocabulary import most_frequent, supervised_counts


def sample(ids, mask):
    return Sample(id="a", ids=np.asarray(ids, np.int32), loss_mask=np.asarray(mask, np.bool_))


def test_only_tokens_that_are_trained_on_count():
    source = [sample([1, 2, 2, 3], [0, 1, 1, 0]), sample([2, 5], [0, 1])]
    assert supervised_counts(source, 6).tolist() == [0, 0, 2, 0, 0, 1]


def test_ties_and_unseen_ids_go_to_the_lower_id():
    counts = np.array([0, 3, 0, 3, 9, 3, 0])
    assert most_frequent(counts, 3).tolist() == [1, 3, 4]
    assert most_frequent(counts, 6).tolist() == [0, 1, 2, 3, 4, 5]


def test_what_has_no_vocabulary_is_named():
    with pytest.raises(ValueError, match=r"drafter.vocabulary: expected at most 7 ids, .* got 8"):
        most_frequent(np.zeros(7, np.int64), 8)
    with pytest.raises(ValueError, match="sample a: expected ids below 6, the target's vocabulary, got 9"):
        supervised_counts([sample([1, 9], [1, 1])], 6)
