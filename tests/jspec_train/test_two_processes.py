"""One program over two processes of one machine: decoding and training, as one process does them."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import json, sys

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

address, process = sys.argv[1], int(sys.argv[2])
if process >= 0:
    jax.distributed.initialize(address, num_processes=2, process_id=process)
assert len(jax.devices()) == 2, jax.devices()

from mesh_models import chain_drafter, engine_on
from test_step import trainer_of
from training_data import HIDDEN, documents, tiny_drafter, tiny_target

from jspec.settings import Settings
from jspec.sharding import first_process_decides

assert first_process_decides((max(process, 0), 7)) == (0, 7)
engine = engine_on(2, chain_drafter, max_slots=1)
settings = [Settings(max_tokens=8), Settings(max_tokens=8, temperature=1.0, seed=5)]
results = engine.generate([[1, 2, 3, 4], [9, 8, 7]], settings)

config, params = tiny_drafter()
trainer = trainer_of(config, devices=2)

def spread(tree, spec):
    sharding = NamedSharding(trainer.mesh, spec)
    def place(x):
        values = np.asarray(x)
        return jax.make_array_from_callback(values.shape, sharding, lambda at: values[at])
    return jax.tree.map(place, tree)

batch = spread(documents(4, 24, 2 * HIDDEN), PartitionSpec("data"))
target = spread(tiny_target(), PartitionSpec())
state, update, losses = trainer.start(params), jax.jit(trainer.update), []
for _ in range(3):
    state, report = update(state, (), target, [batch])
    losses.append(float(report.terms.loss()))
tokens = [list(result.token_ids) for result in results]
print(json.dumps({"tokens": tokens, "accepted": [r.counters.accepted for r in results], "losses": losses}))
"""


def start(address: str, process: int, devices: int) -> subprocess.Popen[str]:
    paths = [ROOT, ROOT / "train", ROOT / "tests", ROOT / "tests" / "jspec_train"]
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), address, str(process)],
        env=os.environ
        | {
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def result(process: subprocess.Popen[str]) -> dict:
    out, err = process.communicate(timeout=400)
    assert process.returncode == 0, err[-3000:]
    return json.loads(out.splitlines()[-1])


@contextlib.contextmanager
def ended(*processes: subprocess.Popen[str]):
    """None of them outlives the test."""
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_two_processes_decode_and_train_as_one():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with ended(*(start(address, process, devices=1) for process in range(2))) as both:
        first, second = (result(process) for process in both)
    with ended(start(address, -1, devices=2)) as (one,):
        alone = result(one)
    assert first == second
    assert first["tokens"] == alone["tokens"]
    assert first["accepted"] == alone["accepted"]
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert first["losses"][-1] < first["losses"][0]
