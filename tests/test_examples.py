"""The examples run: with tiny models, a few updates."""

import importlib.util
import shutil
from pathlib import Path

import tokenizers

ROOT = Path(__file__).parents[1]
TEMPLATE = "{% for m in messages %}{{ m.content }} {% endfor %}"


def load_example(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_train_a_drafter(tmp_path, capsys):
    folder = tmp_path / "target"
    shutil.copytree(ROOT / "tests" / "data" / "targets" / "llama_plain", folder)
    words = {f"w{index}": index for index in range(61)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w5"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    example = load_example("train_a_drafter")
    example.main(
        str(folder), str(tmp_path / "drafter"), updates=3, tokens=24, mask_token_id=60, layers=(0, 2)
    )
    printed = capsys.readouterr().out
    assert "update 2: loss" in printed and "tokens a round" in printed
    assert (tmp_path / "drafter" / "model.safetensors").is_file()


def test_the_example_is_short_and_imports_no_program():
    source = (ROOT / "examples" / "train_a_drafter.py").read_text()
    lines = [line for line in source.splitlines() if line.strip() and not line.strip().startswith("#")]
    assert len(lines) < 60 and "jspec_train" not in source
