"""The jspec side of train_step.py, whatever the method: a training run's own update, timed."""

import time
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from train_step_sizes import (
    EPS,
    HEAD_SIZE,
    HEADS,
    HIDDEN,
    KV_HEADS,
    MAX_GRAD_NORM,
    MLP,
    RATE,
    ROWS,
    THETA,
    VOCABULARY,
)

from jspec.net import Leaf
from jspec.objectives.batch import TrainBatch
from jspec.objectives.frozen import Tables
from jspec.sharding import make_mesh
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope
from jspec_train.optimizer import adamw, learning_rate_schedule
from jspec_train.step import Objective, Trainer
from pallas_kernels.pytree import pytree


@pytree
class TiedTables:
    """A target whose head is its embedding."""

    table: jax.Array

    def embed(self, ids: jax.Array) -> jax.Array:
        """Rows of the table."""
        return self.table[ids]

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Products with all rows."""
        return hidden @ self.table.T


def decoder(architecture: str, num_layers: int, *, query_key_norm: bool = False) -> DecoderConfig:
    """Layers of the sizes that are trained."""
    return DecoderConfig(
        architecture=architecture,
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_layers=num_layers,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        norm_eps=EPS,
        max_context=2048,
        full_rope=Rope(theta=THETA),
        layer_kinds=("full",) * num_layers,
        query_key_norm=query_key_norm,
        query_scale=HEAD_SIZE**-0.5,
    )


def whole_rows(ids: np.ndarray, features: np.ndarray, loss_mask: np.ndarray) -> TrainBatch:
    """A batch of rows that are one document each, without padding."""
    places = np.broadcast_to(np.arange(ids.shape[1], dtype=np.int32), ids.shape)
    return TrainBatch(
        ids=jnp.asarray(ids),
        loss_mask=jnp.asarray(loss_mask),
        segments=jnp.ones(ids.shape, jnp.int32),
        positions=jnp.asarray(places),
        features=jnp.asarray(features),
    )


def timed_updates(
    objective: Objective,
    leaves: tuple[Leaf, ...],
    given: Mapping[str, np.ndarray],
    target: Tables,
    batch: TrainBatch,
    steps: int,
    *,
    frozen: tuple[str, ...] = (),
) -> list[tuple[float, float]]:
    """(seconds, loss) of each update; one more than `steps`, as the first one compiles.

    Args:
      objective: the loss.
      leaves: of the drafter.
      given: their values, by path.
      target: embedding and head.
      batch: the same for every update.
      steps: updates after the first.
      frozen: paths of leaves that are not trained.
    """
    assert batch.ids.shape[0] == ROWS
    trainer = Trainer(
        objective=objective,
        optimizer=adamw(
            learning_rate_schedule("constant", peak=RATE, total_steps=10**6, warmup_steps=0),
            max_grad_norm=MAX_GRAD_NORM,
        ),
        leaves=leaves,
        mesh=make_mesh(tensor=1),
        seed=0,
        frozen=frozenset(frozen),
    )
    state: Any = trainer.start(tuple(jnp.asarray(given[leaf.path]) for leaf in leaves))
    kept = tuple(jnp.asarray(given[path]) for path in frozen)
    update = jax.jit(trainer.update, donate_argnums=(0,))
    measured = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        state, report = update(state, kept, target, [batch])
        loss = float(report.terms.loss())
        measured.append((time.perf_counter() - start, loss))
    return measured
