"""The soak, run for a moment: the script itself works."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "benchmarks"
pytestmark = pytest.mark.extended


def test_soak_finds_nothing(tmp_path):
    command = [sys.executable, str(SCRIPTS / "soak.py"), "--requests", "400", "--growth", "64"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "soak.json")], capture_output=True, text=True, timeout=400
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = json.loads((tmp_path / "soak.json").read_text())
    assert found["equal_to_solo"] + found["clients_that_left"] == 400
    assert found["equal_to_solo"] > 200
    for name in ("cancelled", "preemptions", "reused_prompt_tokens", "verified", "accepted"):
        assert found[name] > 0, name
