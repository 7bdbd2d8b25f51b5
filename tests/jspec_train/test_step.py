import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from training_data import HIDDEN, documents, tiny_drafter, tiny_target

from jspec.drafters.dflash import dflash_leaves
from jspec.objectives.blocks import choose_anchors
from jspec.objectives.dflash import DFlashObjective
from jspec.sharding import make_mesh
from jspec_train.optimizer import adamw, learning_rate_schedule
from jspec_train.step import Trainer


def trainer_of(config, *, devices: int = 1, **options) -> Trainer:
    schedule = learning_rate_schedule("constant", peak=1e-2, total_steps=10, warmup_steps=0)
    return Trainer(
        objective=DFlashObjective(config=config, num_anchors=6, chunk_blocks=5, **options),
        optimizer=adamw(schedule, max_grad_norm=1.0),
        leaves=dflash_leaves(config, jnp.dtype(jnp.float32)),
        mesh=make_mesh(tensor=1, data=devices),
        seed=3,
    )


def run(trainer, params, target, windows):
    state, update, losses = trainer.start(params), jax.jit(trainer.update), []
    for window in windows:
        state, report = update(state, (), target, window)
        losses.append(float(report.terms.loss()))
    return state, losses


def test_loss_falls():
    config, params = tiny_drafter()
    batch = documents(4, 24, 2 * HIDDEN)
    _, losses = run(trainer_of(config), params, tiny_target(), [[batch]] * 30)
    assert losses[-1] < 0.8 * losses[0]


class EveryAnchor(DFlashObjective):
    """Takes the first anchors instead of random ones, so that batches can be compared in pieces."""

    def choose(self, batch, key):
        return choose_anchors(batch, jnp.zeros(batch.ids.shape), num_anchors=batch.ids.shape[1] - 1)


def every_anchor(trainer: Trainer) -> Trainer:
    fields = {f.name: getattr(trainer.objective, f.name) for f in dataclasses.fields(trainer.objective)}
    return dataclasses.replace(trainer, objective=EveryAnchor(**fields))


def test_micro_batches_of_a_window_are_one_batch():
    config, params = tiny_drafter()
    target, batch = tiny_target(), documents(4, 24, 2 * HIDDEN)
    # Rows with very different numbers of supervised tokens: a mean of means would differ.
    batch = dataclasses.replace(batch, loss_mask=batch.loss_mask.at[2:, 8:].set(False))
    halves = [jax.tree.map(lambda a: a[:2], batch), jax.tree.map(lambda a: a[2:], batch)]
    trainer = every_anchor(trainer_of(config, gamma=3.0))
    whole, losses = run(trainer, params, target, [[batch]] * 3)
    pieces, same = run(trainer, params, target, [halves] * 3)
    np.testing.assert_allclose(losses, same, rtol=1e-5)
    for a, b in zip(whole.masters, pieces.masters, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def test_an_update_that_is_not_finite_changes_nothing():
    config, params = tiny_drafter()
    trainer, batch = trainer_of(config), documents(2, 24, 2 * HIDDEN)
    broken = dataclasses.replace(batch, features=batch.features.at[1, 5].set(jnp.nan))
    state = trainer.start(params)
    after, report = jax.jit(trainer.update)(state, (), tiny_target(), [broken])
    assert not report.sound
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(a, b)


def test_weights_are_bfloat16_and_masters_float32():
    config, params = tiny_drafter()
    trainer = dataclasses.replace(trainer_of(config), leaves=dflash_leaves(config, jnp.dtype(jnp.bfloat16)))
    state, _ = jax.jit(trainer.update)(
        trainer.start(params), (), tiny_target(), [documents(2, 24, 2 * HIDDEN)]
    )
    weights = trainer.params(state, ())
    assert {w.dtype.name for w in weights} == {"bfloat16", "float32"}
    assert all(m.dtype == jnp.float32 for m in state.masters)
