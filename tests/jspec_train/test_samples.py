import dataclasses
import json
import pickle
import shutil

import numpy as np
import pytest

from jspec.features import FeatureContract
from jspec_train.sample import Sample
from jspec_train.sample_header import Header
from jspec_train.samples import SampleWriter, open_samples

HEADER = Header(kind="samples", tokenizer="t0", template="c0", max_length=8, settings={"last_turn": False})
CONTRACT = FeatureContract(names=("layer.0", "layer.1"), width=4, dtype="bfloat16", target="tiny")


def sample(number, length=3, **changes):
    ids = np.arange(length, dtype=np.int32) + number
    return Sample(**{"id": f"s{number}", "ids": ids, "loss_mask": ids % 2 == 0} | changes)


def write(folder, numbers, header=HEADER, **options):
    with SampleWriter(folder, header, **options) as writer:
        for number in numbers:
            writer.write(sample(number))
        return writer.finish({"rows": len(numbers)})


def test_samples_come_back_in_order_over_shards(tmp_path):
    source = write(tmp_path / "s", range(7), shard_samples=3)
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        "dataset.json",
        "shard-00000.array_record",
        "shard-00001.array_record",
        "shard-00002.array_record",
    ]
    assert len(source) == 7
    assert [source[i].id for i in range(7)] == ["s0", "s1", "s2", "s3", "s4", "s5", "s6"]
    assert source[6].ids.tolist() == [6, 7, 8]
    assert source.report == {"rows": 7}
    assert source.header == HEADER
    assert (source.counts.samples, source.counts.tokens, source.counts.longest) == (7, 21, 3)
    assert source.counts.supervised_tokens == 4 * 2 + 3 * 1
    with pytest.raises(IndexError, match="expected 0 to 6, got 7"):
        source[7]


def test_shards_end_at_their_size_in_bytes(tmp_path):
    write(tmp_path / "s", range(4), shard_bytes=1)
    assert len(list((tmp_path / "s").glob("*.array_record"))) == 4


def test_content_names_the_samples_and_their_order_but_not_the_shards(tmp_path):
    a = write(tmp_path / "a", [1, 2, 3], shard_samples=1).counts.content
    assert a == write(tmp_path / "b", [1, 2, 3]).counts.content
    assert a != write(tmp_path / "c", [1, 3, 2]).counts.content


def test_a_source_can_be_sent_to_another_process(tmp_path):
    source = write(tmp_path / "s", range(3))
    source[0]
    assert pickle.loads(pickle.dumps(source))[2].id == "s2"


def interrupt(folder, numbers, after, **options):
    """Writes with cursors, and is interrupted after `after` samples."""
    with pytest.raises(KeyboardInterrupt), SampleWriter(folder, HEADER, **options) as writer:
        for number in numbers:
            if number == after:
                raise KeyboardInterrupt
            writer.write(sample(number), cursor=number + 1)


def test_an_interrupted_folder_is_continued_where_it_stopped(tmp_path):
    whole = write(tmp_path / "whole", range(7), shard_samples=3)
    interrupt(tmp_path / "s", range(7), 5, shard_samples=3)
    with pytest.raises(ValueError, match=r"which was interrupted; run the same command again"):
        open_samples(tmp_path / "s")
    with SampleWriter(tmp_path / "s", HEADER, shard_samples=3) as writer:
        assert writer.cursor == 5 == writer.counts.samples
        for number in range(writer.cursor, 7):
            writer.write(sample(number))
        source = writer.finish()
    assert [source[i].id for i in range(7)] == [f"s{i}" for i in range(7)]
    assert source.counts == whole.counts
    assert not list((tmp_path / "s").glob("unfinished*"))


def test_a_process_that_dies_loses_its_open_shard_alone(tmp_path):
    writer = SampleWriter(tmp_path / "s", HEADER, shard_samples=3)
    for number in range(5):
        writer.write(sample(number), cursor=number + 1)
    dead = tmp_path / "dead"
    shutil.copytree(tmp_path / "s", dead)  # as the disk was
    (dead / "shard-00002.array_record").write_bytes(b"renamed, but not entered yet")
    with SampleWriter(dead, HEADER, shard_samples=3) as again:
        assert again.cursor == 3
        for number in range(3, 5):
            again.write(sample(number))
        source = again.finish()
    assert [source[i].id for i in range(len(source))] == ["s0", "s1", "s2", "s3", "s4"]
    writer.finish()


def test_cursor_moves_past_inputs_without_a_sample_only_with_the_shard(tmp_path):
    with SampleWriter(tmp_path / "s", HEADER, shard_samples=2) as writer:
        writer.mark({"row": 1})
        assert writer.cursor is None
        writer.write(sample(0), cursor={"row": 2})
        writer.write(sample(1), cursor={"row": 3})
        assert writer.cursor == {"row": 3}
        writer.mark({"row": 4})
        writer.write(sample(2), cursor={"row": 5})
    assert SampleWriter(tmp_path / "s", HEADER).cursor == {"row": 5}


def test_continuing_with_other_settings_is_refused_and_names_the_first(tmp_path):
    interrupt(tmp_path / "s", range(3), 2)
    other = dataclasses.replace(HEADER, settings={"last_turn": True})
    with pytest.raises(ValueError, match=r"expected samples with settings.last_turn False, got True"):
        SampleWriter(tmp_path / "s", other)
    with pytest.raises(ValueError, match=r"max_length 8, got 9"):
        SampleWriter(tmp_path / "s", dataclasses.replace(HEADER, max_length=9))


def test_finished_and_foreign_folders_are_not_written_into(tmp_path):
    write(tmp_path / "s", range(2))
    with pytest.raises(ValueError, match="got a finished one; use another"):
        SampleWriter(tmp_path / "s", HEADER)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ValueError, match=r"expected an empty folder, got thesis.tex in it"):
        SampleWriter(tmp_path / "mine", HEADER)
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_an_empty_folder_is_not_finished(tmp_path):
    with (
        pytest.raises(ValueError, match="expected at least one sample, got none"),
        SampleWriter(tmp_path / "s", HEADER) as writer,
    ):
        writer.finish({"dropped": 3})
    assert not (tmp_path / "s").exists()


def test_a_folder_without_samples_may_be_begun_in_another_way(tmp_path):
    SampleWriter(tmp_path / "s", HEADER)  # and the process dies
    writer = SampleWriter(tmp_path / "s", dataclasses.replace(HEADER, max_length=9))
    writer.write(sample(0, length=9))
    assert len(writer.finish()) == 1


def test_a_full_disk_is_one_clear_error_and_finished_shards_stay(tmp_path, monkeypatch):
    import jspec_train.samples as module

    class Full(module.ArrayRecordWriter):
        def close(self):
            super().close()
            raise RuntimeError("write() failed: No space left on device")

    with SampleWriter(tmp_path / "s", HEADER, shard_samples=2) as writer:
        writer.write(sample(0), cursor=1)
        writer.write(sample(1), cursor=2)
    monkeypatch.setattr(module, "ArrayRecordWriter", Full)
    with (
        pytest.raises(OSError, match=r"No space left.*make room and run the same command again"),
        SampleWriter(tmp_path / "s", HEADER, shard_samples=2) as writer,
    ):
        writer.write(sample(2))
        writer.write(sample(3))
    monkeypatch.undo()
    assert sorted(path.name for path in (tmp_path / "s").iterdir()) == [
        "shard-00000.array_record",
        "unfinished.json",
    ]
    assert SampleWriter(tmp_path / "s", HEADER).cursor == 2


def test_records_that_never_reached_the_disk_are_noticed(tmp_path, monkeypatch):
    import jspec_train.samples as module

    monkeypatch.setattr(module, "_num_records", lambda path: 1)
    with (
        pytest.raises(OSError, match="1 of 2 records arrived"),
        SampleWriter(tmp_path / "s", HEADER, shard_samples=2) as writer,
    ):
        writer.write(sample(2))
        writer.write(sample(3))


def test_a_folder_that_is_not_what_it_says_is_refused(tmp_path):
    write(tmp_path / "s", range(4), shard_samples=2)
    write(tmp_path / "t", range(9), shard_samples=3)
    with pytest.raises(FileNotFoundError, match="does not exist; run `jspec prepare` first"):
        open_samples(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"without dataset.json; check the path"):
        open_samples(tmp_path)

    mixed = shutil.copytree(tmp_path / "s", tmp_path / "mixed")
    shutil.copy(tmp_path / "t" / "shard-00002.array_record", mixed)
    with pytest.raises(ValueError, match=r"got also shard-00002.array_record; folders cannot be mixed"):
        open_samples(mixed)

    lost = shutil.copytree(tmp_path / "s", tmp_path / "lost")
    (lost / "shard-00001.array_record").unlink()
    with pytest.raises(ValueError, match=r"got no such file; the copy is incomplete"):
        open_samples(lost)

    # A cut array_record opens without complaint and says that it holds nothing.
    cut = shutil.copytree(tmp_path / "s", tmp_path / "cut")
    path = cut / "shard-00001.array_record"
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"expected .* with \d+ bytes, got \d+; the copy is incomplete"):
        open_samples(cut)

    for name, text, message in (
        ("text", "hello", "expected .* of format 'jspec samples', got another file"),
        ("other", '{"format": "other"}', "got 'other' version None"),
        ("newer", '{"format": "jspec samples", "version": 2}', "got 'jspec samples' version 2"),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "dataset.json").write_text(text)
        with pytest.raises(ValueError, match=message):
            open_samples(tmp_path / name)


def test_features_follow_the_contract_of_the_header(tmp_path):
    header = dataclasses.replace(HEADER, kind="features", features=CONTRACT, target="tiny")
    features = np.arange(12, dtype=np.float32).reshape(3, 4).astype("bfloat16")
    with SampleWriter(tmp_path / "f", header) as writer:
        for wrong, got in ((None, "None"), (features[:, :3], r"bfloat16\[3, 3\]")):
            with pytest.raises(ValueError, match=rf"expected features bfloat16\[3, 4\] .*, got {got}"):
                writer.write(sample(0, features=wrong))
        with pytest.raises(ValueError, match=r"got float32\[3, 4\]"):
            writer.write(sample(0, features=features.astype(np.float32)))
        writer.write(sample(0, features=features))
        source = writer.finish()
    assert source.header.features == CONTRACT
    assert source[0].features.tobytes() == features.tobytes()
    with SampleWriter(tmp_path / "s", HEADER) as writer:
        with pytest.raises(ValueError, match="expected no features in samples of kind 'samples'"):
            writer.write(sample(0, features=features))
        with pytest.raises(ValueError, match="expected at most 8 tokens, got 9"):
            writer.write(sample(0, length=9))


def test_kind_and_contract_go_together():
    with pytest.raises(ValueError, match="expected a contract exactly for kind 'features'"):
        dataclasses.replace(HEADER, kind="features")
    with pytest.raises(ValueError, match="expected 'samples' or 'features', got 'text'"):
        dataclasses.replace(HEADER, kind="text")


def test_dataset_json_says_what_is_in_the_folder(tmp_path):
    write(tmp_path / "s", range(2))
    state = json.loads((tmp_path / "s" / "dataset.json").read_text())
    assert state["format"] == "jspec samples" and state["version"] == 1
    assert state["header"]["max_length"] == 8
    assert state["counts"]["tokens"] == 6
    assert [shard["samples"] for shard in state["shards"]] == [2]
