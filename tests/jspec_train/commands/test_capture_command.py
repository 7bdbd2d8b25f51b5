import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers

from jspec.cli import main
from jspec.text.tokenizer import load_tokenizer
from jspec_train.sample import Sample
from jspec_train.sample_header import Header
from jspec_train.samples import SampleWriter, open_samples

LLAMA = Path(__file__).parents[2] / "data" / "targets" / "llama_plain"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny Llama with a tokenizer of 61 words."""
    folder = tmp_path_factory.mktemp("model")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(LLAMA / name, folder / name)
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(61)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@pytest.fixture(scope="module")
def header(model):
    return Header(kind="samples", tokenizer=load_tokenizer(model).identity, template="", max_length=16)


def write(folder, header):
    with SampleWriter(folder, header) as writer:
        for number in range(3):
            ids = np.arange(1 + number, 9 + number, dtype=np.int32)
            writer.write(Sample(id=f"s{number}", ids=ids, loss_mask=ids > 4))
        writer.finish()
    return folder


def run(*arguments):
    main(["capture", *map(str, arguments), "--compilation-cache", ""])


def test_the_plan_is_said_and_starts_nothing(model, header, tmp_path, capsys):
    samples = write(tmp_path / "samples", header)
    with pytest.raises(SystemExit) as left:
        run(samples, tmp_path / "features", "--target", model, "--layers=-1,1", "--final-norm", "--plan")
    assert left.value.code == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "embedding, layer.1, final_norm of llama, 3 layers" in said
    assert "72 x bfloat16 per token 3 samples, 24 tokens: 0.00 GB to write" in said
    assert "tokens/s, at most 1 programs to compile" in said
    assert not (tmp_path / "features").exists()


def test_features_are_written(model, header, tmp_path, capsys):
    samples = write(tmp_path / "samples", header)
    with pytest.raises(SystemExit) as left:
        run(
            samples, tmp_path / "features", "--target", model, "--layers", "0,1", "--feature-dtype", "float32"
        )
    assert left.value.code == 0
    stored = open_samples(tmp_path / "features")
    assert stored.header.features.names == ("layer.0", "layer.1")
    assert [stored[i].features.shape for i in range(3)] == [(8, 48)] * 3
    assert "3 samples in" in capsys.readouterr().err


def test_what_is_wrong_is_one_line(model, header, tmp_path, capsys):
    samples = write(tmp_path / "samples", header)
    foreign = write(tmp_path / "foreign", dataclasses.replace(header, tokenizer="0" * 64))
    for folder, options, line in (
        (samples, ["--layers", "0,7"], "layer 7 does not exist; the model has 3 layers"),
        (samples, ["--layers", "1,1"], 'layers: expected different layers such as "1,13,26"'),
        (foreign, ["--layers", "0"], "samples: expected samples of the target's tokenizer"),
        (tmp_path / "none", [], "samples: expected a folder, got"),
    ):
        with pytest.raises(SystemExit) as left:
            run(folder, tmp_path / "features", "--target", model, *options)
        assert left.value.code
        said = capsys.readouterr().err
        assert said.startswith("jspec capture: ") and line in said and said.count("\n") == 1
    assert not (tmp_path / "features").exists()
