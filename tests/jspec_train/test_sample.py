import dataclasses
import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jspec_train.sample import Sample, decode, encode

IDS = np.array([5, 6, 7, 2], np.int32)
MASK = np.array([False, False, True, True])
FEATURES = np.array([[1.5, -0.0], [np.nan, np.inf], [3e-40, 1e30], [0.1, 7.0]], np.float32)


def sample(**changes):
    return Sample(**{"id": "a:1", "ids": IDS, "loss_mask": MASK, "task": "chat"} | changes)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_a_sample_reads_back_bit_equal(dtype):
    features = FEATURES.astype(dtype)
    back = decode(encode(sample(features=features)))
    assert (back.id, back.task) == ("a:1", "chat")
    assert back.ids.dtype == np.int32 and back.ids.tolist() == [5, 6, 7, 2]
    assert back.loss_mask.dtype == np.bool_ and back.loss_mask.tolist() == [False, False, True, True]
    assert back.features.dtype == dtype
    assert back.features.tobytes() == features.tobytes()


def test_without_features_there_are_none():
    assert decode(encode(sample())).features is None


def test_equal_samples_have_equal_records():
    assert encode(sample(features=FEATURES)) == encode(sample(features=FEATURES.copy()))


def test_content_is_ids_and_mask_alone():
    assert sample().content == sample(id="b", task="", features=FEATURES).content
    assert sample().content != sample(ids=IDS[::-1]).content
    assert sample().content != sample(loss_mask=MASK[::-1]).content


@pytest.mark.parametrize("name", ["ids", "loss_mask", "features"])
def test_a_changed_record_is_refused(name):
    record = bytearray(encode(sample(features=FEATURES)))
    header_length = int.from_bytes(record[:8], "little")
    header = json.loads(record[8 : 8 + header_length])
    record[8 + header_length + header[name]["data_offsets"][0]] ^= 1
    with pytest.raises(ValueError, match=r"sample a:1: expected the content it was written with"):
        decode(bytes(record))


def test_foreign_bytes_are_refused():
    for record in (b"", b"hello, this is no sample", safetensors.numpy.save({"ids": IDS})):
        with pytest.raises(ValueError, match="record: expected a sample written by jspec"):
            decode(record)


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ids": IDS.astype(np.int64)}, r"expected ids int32\[length\], got int64\[4\]"),
        ({"loss_mask": MASK.astype(np.int32)}, r"expected loss_mask bool\[length\], got int32\[4\]"),
        ({"loss_mask": MASK[:3]}, r"as many ids as mask values and at least one, got 4 and 3"),
        ({"ids": IDS[:0], "loss_mask": MASK[:0]}, r"at least one, got 0 and 0"),
        ({"features": FEATURES[:3]}, r"features of 4 rows, got float32\[3, 2\]"),
        ({"features": FEATURES.astype(np.float64)}, r"got float64\[4, 2\]"),
        ({"features": FEATURES[:, 0]}, r"features \[length, width\], got 1 axes"),
    ],
)
def test_arrays_that_do_not_belong_together_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        sample(**changes)


def test_a_sample_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample().id = "other"
