"""The loss of EAGLE-3 is one mean over all micro-batches and devices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import dataclasses, json, jax, jax.numpy as jnp, numpy as np
from eagle_texts import drafter, tables
from training_data import HIDDEN, documents
from jspec.drafters.eagle_net import eagle_leaves
from jspec.objectives.eagle3 import Eagle3Objective
from jspec.sharding import make_mesh
from jspec_train.optimizer import adamw, learning_rate_schedule
from jspec_train.step import Trainer

config, params = drafter()
leaves = eagle_leaves(config, jnp.dtype(jnp.float32))
frozen = tuple(p for p, leaf in zip(params, leaves, strict=True) if leaf.path == "draft_ids")
schedule = learning_rate_schedule("constant", peak=1e-2, total_steps=10, warmup_steps=0)
batch = documents(16, 8, 4 * HIDDEN)
# Rows with very different numbers of supervised tokens: a mean of means would be another.
batch = dataclasses.replace(batch, loss_mask=batch.loss_mask.at[8:, 5:].set(False))
halves = [jax.tree.map(lambda a: a[:8], batch), jax.tree.map(lambda a: a[8:], batch)]

def trained(loss, devices, window):
    objective = Eagle3Objective(config=config, depths=2, chunk=8, loss=loss, data_axis="data")
    trainer = Trainer(
        objective=objective, optimizer=adamw(schedule, max_grad_norm=1.0), leaves=leaves,
        mesh=make_mesh(tensor=1, data=devices), seed=3,
    )
    state, update, losses = trainer.start(params), jax.jit(trainer.update), []
    for _ in range(2):
        state, report = update(state, frozen, tables(config), window)
        losses.append(float(report.terms.loss()))
    return losses + [float(np.abs(m).sum()) for m in state.masters]

runs = {"cross_entropy": halves, "lk_lambda": [batch]}
print(json.dumps({loss: [trained(loss, 1, [batch]), trained(loss, 8, window)] for loss, window in runs.items()}))
"""


@pytest.fixture(scope="module")
def runs():
    paths = [ROOT, ROOT / "train", ROOT / "tests", ROOT / "tests" / "jspec_train"]
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0",
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
    }
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_micro_batches_on_eight_devices_are_one_batch_on_one(runs):
    np.testing.assert_allclose(*runs["cross_entropy"], rtol=2e-4)


def test_how_much_lk_lambda_asks_of_a_depth_is_decided_over_all_devices(runs):
    """Its share depends on the acceptance of the micro-batch, which lies on all of them."""
    np.testing.assert_allclose(*runs["lk_lambda"], rtol=2e-4)
