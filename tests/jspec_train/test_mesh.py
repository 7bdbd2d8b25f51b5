import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import json, jax, numpy as np
from test_step import run, trainer_of
from training_data import HIDDEN, documents, tiny_drafter, tiny_target
config, params = tiny_drafter()
target, batch = tiny_target(), documents(8, 24, 2 * HIDDEN)
out = {}
for devices in (1, 2, 8):
    trainer = trainer_of(config, devices=devices, loss="lk_lambda", data_axis="data")
    state, losses = run(trainer, params, target, [[batch]] * 3)
    split = sum(not m.sharding.is_fully_replicated for m in state.masters)
    out[devices] = {"losses": losses, "split": split, "masters": [float(np.abs(m).sum()) for m in state.masters]}
print(json.dumps(out))
"""


@pytest.fixture(scope="module")
def runs():
    paths = [ROOT, ROOT / "train", ROOT / "tests", ROOT / "tests" / "jspec_train"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("devices", ["2", "8"])
def test_devices_change_nothing_but_the_order_of_sums(runs, devices):
    np.testing.assert_allclose(runs[devices]["losses"], runs["1"]["losses"], rtol=1e-5)
    np.testing.assert_allclose(runs[devices]["masters"], runs["1"]["masters"], rtol=1e-4)


def test_state_is_split_over_the_devices(runs):
    assert runs["8"]["split"] == len(runs["8"]["masters"]) - 4  # head-sized norms do not divide by 8
