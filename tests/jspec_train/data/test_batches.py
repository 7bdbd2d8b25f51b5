import json

import ml_dtypes
import numpy as np
import pytest

from jspec_train.data.batches import batches
from jspec_train.sample import Sample

NUMBER = 11


def sample(number, length, features):
    ids = np.arange(length, dtype=np.int32) + 100 * number
    rows = (ids[:, None] + np.arange(3, dtype=np.int32)[None]).astype(np.float32).astype(ml_dtypes.bfloat16)
    return Sample(id=f"s{number}", ids=ids, loss_mask=ids % 2 == 0, features=rows if features else None)


def source(features=False):
    lengths = np.random.default_rng(0).integers(2, 9, NUMBER)
    return [sample(number, int(length), features) for number, length in enumerate(lengths)]


def read(count=None, samples=None, state=None, **options):
    """The first batches and the states behind each."""
    iterator = batches(
        source() if samples is None else samples,
        **{"batch_size": 2, "max_length": 16, "seed": 1, "bucket": 4} | options,
    )
    try:
        if state is not None:
            iterator.set_state(state)
        found, states = [], []
        while count is None or len(found) < count:
            try:
                found.append(next(iterator))
            except StopIteration:
                break
            states.append(json.loads(json.dumps(iterator.get_state())))
        return found, states
    finally:
        iterator.close()


def names(found):
    return [name for batch in found for row in batch["sample_ids"] for name in row]


def equal(a, b):
    return a.keys() == b.keys() and all(
        a[name] == b[name] if name == "sample_ids" else a[name].tobytes() == b[name].tobytes() for name in a
    )


def test_a_row_is_a_document_and_padding():
    (batch,), _ = read(samples=[sample(0, 3, True), sample(1, 5, True)], epochs=1, shuffle=False)
    assert batch["ids"].tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [100, 101, 102, 103, 104, 0, 0, 0]]
    assert batch["loss_mask"].tolist() == [[1, 0, 1, 0, 0, 0, 0, 0], [1, 0, 1, 0, 1, 0, 0, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1, 0, 0, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 0, 0, 0, 0], [0, 1, 2, 3, 4, 0, 0, 0]]
    assert batch["features"].shape == (2, 8, 3) and batch["features"].dtype == ml_dtypes.bfloat16
    assert batch["features"][1, 4].tolist() == [104, 105, 106] and not batch["features"][1, 5:].any()
    assert batch["sample_ids"] == (("s0",), ("s1",))
    assert [batch[name].dtype.name for name in ("ids", "loss_mask", "segments", "positions")] == [
        "int32",
        "bool",
        "int32",
        "int32",
    ]


def test_rows_are_padded_to_the_bucket_of_the_longest_of_the_batch():
    samples = [sample(number, length, False) for number, length in enumerate((3, 4, 5, 2))]
    found, _ = read(samples=samples, epochs=1, shuffle=False)
    assert [batch["ids"].shape for batch in found] == [(2, 4), (2, 8)]


def test_packed_rows_hold_whole_documents_whose_positions_restart():
    samples = [sample(number, length, True) for number, length in enumerate((3, 4, 2, 5))]
    (batch,), _ = read(samples=samples, epochs=1, shuffle=False, pack=True, max_length=8)
    assert batch["ids"].tolist() == [[0, 1, 2, 100, 101, 102, 103, 0], [200, 201, 300, 301, 302, 303, 304, 0]]
    assert batch["segments"].tolist() == [[1, 1, 1, 2, 2, 2, 2, 0], [1, 1, 2, 2, 2, 2, 2, 0]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2, 3, 0], [0, 1, 0, 1, 2, 3, 4, 0]]
    assert batch["features"][0, 3].tolist() == [100, 101, 102] and not batch["features"][:, 7].any()
    assert batch["loss_mask"].tolist()[0] == [1, 0, 1, 1, 0, 1, 0, 0]
    assert batch["sample_ids"] == (("s0", "s1"), ("s2", "s3"))


@pytest.mark.parametrize("pack", [False, True])
def test_every_epoch_has_every_sample_once_in_another_order(pack):
    found, _ = read(epochs=3, pack=pack, drop_last=False)
    order = names(found)
    epochs = [order[:NUMBER], order[NUMBER : 2 * NUMBER], order[2 * NUMBER :]]
    if pack:  # first fit may put a document before one that came earlier
        assert sorted(order) == sorted([f"s{i}" for i in range(NUMBER)] * 3)
    else:
        assert all(sorted(epoch) == sorted(f"s{i}" for i in range(NUMBER)) for epoch in epochs)
        assert epochs[0] != epochs[1] != epochs[2]


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("epochs", [3, None])
def test_a_restored_iterator_goes_on_bit_equal_from_anywhere(pack, epochs):
    whole, states = read(14, source(features=True), pack=pack, epochs=epochs)
    assert len(whole) > 4
    for number, state in enumerate(states[:-1]):
        rest, rest_states = read(
            len(whole) - number - 1, source(features=True), pack=pack, epochs=epochs, state=state
        )
        assert all(map(equal, rest, whole[number + 1 :])), number
        assert rest_states == states[number + 1 :]


@pytest.mark.parametrize("pack", [False, True])
def test_threads_and_prefetching_change_nothing(pack):
    one, _ = read(12, pack=pack, threads=0, prefetch=0)
    for options in ({"threads": 4, "prefetch": 3}, {"threads": 1, "prefetch": 1}):
        more, _ = read(12, pack=pack, **options)
        assert all(map(equal, one, more))


def test_a_state_fits_whatever_is_prefetched():
    whole, states = read(8, prefetch=2)
    rest, _ = read(4, state=states[3], prefetch=0, threads=0)
    assert all(map(equal, rest, whole[4:]))


def test_the_seed_decides_on_the_order():
    assert names(read(5)[0]) == names(read(5)[0]) != names(read(5, seed=2)[0])
    assert names(read(5, shuffle=False)[0]) == [f"s{i}" for i in range(10)]


def test_what_is_left_at_the_very_end_is_dropped_or_filled_with_padding():
    dropped, _ = read(epochs=1, batch_size=4)
    assert [len(batch["sample_ids"]) for batch in dropped] == [4, 4]
    assert len(names(read(epochs=2, batch_size=4)[0])) == 20  # 22 in all: nothing is lost between the epochs
    filled, _ = read(epochs=1, batch_size=4, drop_last=False)
    assert len(filled) == 3 and len(names(filled)) == NUMBER
    assert filled[2]["sample_ids"][3] == ()
    assert (
        not filled[2]["segments"][3].any()
        and not filled[2]["ids"][3].any()
        and not filled[2]["loss_mask"][3].any()
    )
    packed, _ = read(epochs=1, batch_size=4, drop_last=False, pack=True)
    assert len(names(packed)) == NUMBER and packed[-1]["ids"].shape == (4, 16)


def test_shards_part_each_batch_of_the_common_order():
    whole, _ = read(6, batch_size=4)
    parts = [read(6, batch_size=2, shard=shard, num_shards=2)[0] for shard in range(2)]
    for number, batch in enumerate(whole):
        assert set(names([batch])) == set(names([part[number] for part in parts]))


def test_shards_end_together():
    for drop_last in (True, False):
        parts = [
            read(epochs=1, batch_size=2, shard=shard, num_shards=3, drop_last=drop_last)[0]
            for shard in range(3)
        ]
        assert len({len(part) for part in parts}) == 1 and parts[0]


def test_a_document_that_is_too_long_is_named():
    samples = [sample(0, 3, False), sample(1, 9, False)]
    for pack in (False, True):
        with pytest.raises(
            ValueError, match="max_length: expected at least 9 for sample s1, got 8; raise it"
        ):
            read(1, samples, max_length=8, pack=pack)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"samples": []}, "source: expected at least one sample, got none"),
        ({"batch_size": 0}, "batch_size: expected 1 or more, got 0"),
        (
            {"batch_size": 12, "epochs": 1},
            "batch_size: expected at most 11, what 1 epochs of 11 samples give",
        ),
        ({"shard": 2, "num_shards": 2}, "shard: expected 0 to 1, got 2"),
        (
            {"pack": True, "num_shards": 2, "epochs": 1},
            "epochs: expected None for packed rows in 2 shards, got 1",
        ),
    ],
)
def test_arguments_that_give_no_batch_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        read(1, **options)
