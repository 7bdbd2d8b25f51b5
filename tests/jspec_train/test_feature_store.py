import collections
import dataclasses
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from array_record.python.array_record_module import ArrayRecordWriter

from jspec.capture import Capture, capture_one
from jspec.checkpoints.target import load_target
from jspec_train import feature_store, samples
from jspec_train.feature_store import capture_to_store, plan_capture, weights_fingerprint
from jspec_train.sample import Sample, encode
from jspec_train.sample_header import Header
from jspec_train.samples import SampleWriter, open_samples

LLAMA = Path(__file__).parents[1] / "data" / "targets" / "llama_plain"
LENGTHS = (5, 16, 9, 40, 3, 8)
NAMES = ("layer.0", "layer.1")


@pytest.fixture(scope="module")
def tiny():
    return load_target(LLAMA, dtype="float32")


@pytest.fixture(scope="module")
def chosen(tiny):
    return Capture(target=tiny.target, names=NAMES, buckets=(8, 16))


def write_samples(folder, lengths=LENGTHS, first=0, seed=0):
    rng = np.random.default_rng(seed)
    header = Header(
        kind="samples", tokenizer="t0", template="c0", max_length=64, settings={"last_turn": True}
    )
    with SampleWriter(folder, header) as writer:
        for number, length in enumerate(lengths):
            ids = rng.integers(first, 61, length).astype(np.int32)
            writer.write(Sample(id=f"s{number}", ids=ids, loss_mask=ids % 2 == 0, task="chat"))
        return writer.finish({"rows": len(lengths)})


@pytest.fixture
def source(tmp_path):
    return write_samples(tmp_path / "samples")


def records(folder):
    stored = open_samples(folder)
    return [encode(stored[i]) for i in range(len(stored))]


def test_each_sample_comes_back_with_its_features(tiny, chosen, source, tmp_path):
    seen = []
    stored = capture_to_store(chosen, tiny.params, source, tmp_path / "f", on_progress=seen.append)

    assert stored.header.features == chosen.contract
    assert (stored.header.kind, stored.header.target) == ("features", tiny.target.identity)
    assert stored.header.settings["last_turn"] is True
    assert stored.counts == source.counts
    assert stored.report == {"rows": 6, "dropped_not_finite": []}
    exact = dataclasses.replace(chosen, dtype="float32")
    for index, (length, size) in enumerate(zip(LENGTHS, (8, 16, 16, 48, 8, 8), strict=True)):
        sample, before = stored[index], source[index]
        features = capture_one(exact, tiny.params, np.pad(before.ids, (0, size - length)), np.int32(length))
        assert sample.features.tobytes() == np.asarray(features)[:length].astype(ml_dtypes.bfloat16).tobytes()
        assert (sample.content, sample.task, sample.id) == (before.content, "chat", f"s{index}")
    assert [tally.done for tally in seen] == [0, 1, 2, 3, 4, 5, 6]
    assert seen[-1].tokens == sum(LENGTHS)


def test_order_and_company_change_no_bit(tiny, chosen, source, tmp_path):
    together = capture_to_store(chosen, tiny.params, source, tmp_path / "f")
    header = dataclasses.replace(source.header, settings={})
    with SampleWriter(tmp_path / "turned", header) as writer:
        for index in (4, 3, 0):
            writer.write(source[index])
        turned = capture_to_store(chosen, tiny.params, writer.finish(), tmp_path / "g", shard_bytes=1)
    assert len(list((tmp_path / "g").glob("*.array_record"))) == 3
    for place, index in enumerate((4, 3, 0)):
        assert encode(turned[place]) == encode(together[index])


def test_an_interrupted_capture_goes_on_where_it_stopped(tiny, chosen, source, tmp_path, monkeypatch):
    capture_to_store(chosen, tiny.params, source, tmp_path / "whole")

    def stop(tally):
        if tally.done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_to_store(chosen, tiny.params, source, tmp_path / "f", on_progress=stop)
    with pytest.raises(ValueError, match="which was interrupted"):
        open_samples(tmp_path / "f")
    captured = []
    real = feature_store.capture_one
    monkeypatch.setattr(
        feature_store,
        "capture_one",
        lambda c, p, ids, length: captured.append(int(length)) or real(c, p, ids, length),
    )
    stored = capture_to_store(chosen, tiny.params, source, tmp_path / "f")

    assert captured == [40, 3, 8]
    assert stored.counts == source.counts
    assert records(tmp_path / "f") == records(tmp_path / "whole")


@pytest.mark.parametrize("changed", ["states", "dtype", "weights", "samples", "buckets"])
def test_another_capture_into_the_same_folder_is_refused(tiny, chosen, source, tmp_path, changed):
    def stop(tally):
        if tally.done == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        capture_to_store(chosen, tiny.params, source, tmp_path / "f", on_progress=stop)
    other, params, name = chosen, tiny.params, changed
    if changed == "states":
        other, name = dataclasses.replace(chosen, names=NAMES[::-1]), "features.names"
    elif changed == "dtype":
        other, name = dataclasses.replace(chosen, dtype="float32"), "features.dtype"
    elif changed == "weights":
        params, name = jax.tree.map(lambda leaf: leaf * 1.01, params), "settings.target_weights"
    elif changed == "samples":
        source, name = write_samples(tmp_path / "others", seed=1), "settings.source_content"
    else:
        other, name = dataclasses.replace(chosen, buckets=(16,)), "settings.capture_buckets"

    with pytest.raises(ValueError, match=f"expected samples with {name} "):
        capture_to_store(other, params, source, tmp_path / "f")


Disk = collections.namedtuple("Disk", "total used free")


def test_a_disk_that_is_too_small_is_refused_before_anything_is_made(
    tiny, chosen, source, tmp_path, monkeypatch
):
    plan = plan_capture(chosen, tiny.params, source, tmp_path / "f", measure=False)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: Disk(0, 0, plan.size - 1))
    with pytest.raises(OSError, match=r"out: expected 0.00 GB free for features of 81 tokens in .*make room"):
        capture_to_store(chosen, tiny.params, source, tmp_path / "f")
    assert not (tmp_path / "f").exists()


def test_a_disk_that_fills_up_leaves_whole_shards_and_can_go_on(tiny, chosen, source, tmp_path, monkeypatch):
    class Full(ArrayRecordWriter):
        def write(self, record):
            if len(list((tmp_path / "f").glob("*.array_record"))) == 2:
                raise RuntimeError("No space left on device")
            super().write(record)

    monkeypatch.setattr(samples, "ArrayRecordWriter", Full)
    with pytest.raises(OSError, match=r"No space left on device; make room and run the same command again"):
        capture_to_store(chosen, tiny.params, source, tmp_path / "f", shard_bytes=1)
    assert sorted(path.name for path in (tmp_path / "f").glob("shard-*"))[:2] == [
        "shard-00000.array_record",
        "shard-00001.array_record",
    ]
    monkeypatch.undo()
    capture_to_store(chosen, tiny.params, source, tmp_path / "f", shard_bytes=1)
    capture_to_store(chosen, tiny.params, source, tmp_path / "whole")
    assert records(tmp_path / "f") == records(tmp_path / "whole")
    assert not list((tmp_path / "f").glob("*.part"))


def test_the_plan_says_size_time_and_programs(tiny, tmp_path):
    chosen = Capture(
        target=tiny.target, names=("layer.0", "layer.1", "final_norm"), dtype="float32", buckets=(16, 64)
    )
    source = write_samples(tmp_path / "samples", (60,) * 40)

    plan = plan_capture(chosen, tiny.params, source, tmp_path / "f")

    assert (plan.samples, plan.tokens, plan.width, plan.programs) == (40, 2400, 72, 2)
    assert plan.seconds > 0
    capture_to_store(chosen, tiny.params, source, tmp_path / "f")
    written = sum(path.stat().st_size for path in (tmp_path / "f").glob("*.array_record"))
    assert 0.8 * plan.size < written <= plan.size
    assert (
        plan_capture(chosen, tiny.params, source, tmp_path / "f", measure=False).size == plan.size - written
    )


def test_samples_whose_features_are_not_finite_are_left_out_and_named(chosen, tiny, tmp_path):
    source = write_samples(tmp_path / "samples", (4, 5, 6), first=1)
    poisoned = int(source[1].ids[2])
    others = [i for i in (0, 2) if poisoned not in source[i].ids]
    head = next(
        i for i, leaf in enumerate(tiny.params) if leaf.shape == (24, 61)
    )  # embeddings are its columns
    leaves = list(tiny.params)
    leaves[head] = leaves[head].at[:, poisoned].set(jnp.nan)

    stored = capture_to_store(chosen, tuple(leaves), source, tmp_path / "f")

    assert [stored[i].id for i in range(len(stored))] == [f"s{i}" for i in others]
    assert others and "s1" in stored.report["dropped_not_finite"]
    assert len(others) + len(stored.report["dropped_not_finite"]) == 3


def test_samples_that_the_target_cannot_read_are_refused(tiny, chosen, source, tmp_path):
    with SampleWriter(tmp_path / "strange", source.header) as writer:
        ids = np.array([1, 2, 61], np.int32)
        writer.write(Sample(id="odd", ids=ids, loss_mask=ids > 0))
        strange = writer.finish()
    with pytest.raises(
        ValueError, match="sample odd: expected ids below the target's vocabulary of 61, got 61"
    ):
        capture_to_store(chosen, tiny.params, strange, tmp_path / "f")

    short = dataclasses.replace(tiny.target, config=dataclasses.replace(tiny.target.config, max_context=32))
    with pytest.raises(ValueError, match=r"at most 32 tokens \(the target's context\), got a sample of 40"):
        capture_to_store(dataclasses.replace(chosen, target=short), tiny.params, source, tmp_path / "g")
    assert not (tmp_path / "g").exists()

    stored = capture_to_store(chosen, tiny.params, source, tmp_path / "h")
    with pytest.raises(ValueError, match="samples: expected a folder without features"):
        capture_to_store(chosen, tiny.params, stored, tmp_path / "i")


def test_the_fingerprint_tells_weights_and_dtypes_apart(tiny):
    half = tuple(leaf.astype(jnp.bfloat16) for leaf in tiny.params)
    tuned = (*tiny.params[:-1], tiny.params[-1] + 1e-3)
    assert len({weights_fingerprint(params) for params in (tiny.params, half, tuned)}) == 3
    assert weights_fingerprint(tiny.params) == weights_fingerprint(load_target(LLAMA, dtype="float32").params)
