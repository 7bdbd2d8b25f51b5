"""Imports point one way: pallas_kernels <- jspec <- the two programs, and nothing needs torch."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FORBIDDEN = {
    "pallas_kernels": {"jspec", "jspec_train", "jspec_serve", "torch"},
    "jspec": {"jspec_train", "jspec_serve", "torch"},
    "train/jspec_train": {"jspec_serve", "torch"},
    "serve/jspec_serve": {"jspec_train", "torch"},
}


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.split(".")[0] for name in names}


@pytest.mark.parametrize("package", FORBIDDEN)
def test_packages_import_only_what_is_below_them(package):
    files = list((ROOT / package).rglob("*.py"))
    assert files
    for path in files:
        assert not imported(path) & FORBIDDEN[package], path


def test_import_jspec_needs_no_extra():
    extras = "{'transformers', 'gguf', 'huggingface_hub', 'typer', 'torch'}"
    code = f"import sys, jspec; print(sorted({extras} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.strip() == "[]"
