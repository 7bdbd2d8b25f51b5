import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_texts import IDS, drafter, floating, packed, tables
from training_data import HIDDEN, documents, tiny_target

from jspec.objectives.eagle3 import Eagle3Objective
from jspec.objectives.soft_labels import SoftLabels, agreement, read_teacher, soft_labels
from jspec.objectives.terms import add


def objective_of(config, **options):
    return Eagle3Objective(config=config, **{"depths": 3, "chunk": 4} | options)


def terms_of(objective, params, batch):
    return jax.jit(objective.terms)(params, tables(objective.config), batch)


def test_chunks_change_nothing():
    """Golden cases have chunks of 7 for all losses; here the one that looks at all rows twice."""
    config, params = drafter()
    batch = documents(2, 12, 4 * HIDDEN)
    trained, join = floating(params)
    found = []
    for chunk in (3, 64):
        objective = objective_of(config, depths=2, loss="lk_lambda", chunk=chunk)

        def value(trained, objective=objective):
            return objective.terms(join(trained), tables(config), batch).loss()

        found.append(jax.jit(jax.value_and_grad(value))(trained))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), *found)


def test_the_mean_over_tokens_does_not_depend_on_how_rows_are_batched():
    config, params = drafter()
    batch = documents(4, 12, 4 * HIDDEN)
    batch = dataclasses.replace(batch, loss_mask=batch.loss_mask.at[2:, 5:].set(False))
    objective = objective_of(config, depths=2)
    halves = [jax.tree.map(lambda a, i=i: a[2 * i : 2 * i + 2], batch) for i in range(2)]
    whole = terms_of(objective, params, batch)
    both = add(*(terms_of(objective, params, half) for half in halves))
    np.testing.assert_allclose(whole.loss(), both.loss(), rtol=1e-5)
    mean = [float(terms_of(objective, params, half).loss()) for half in halves]
    assert abs(np.mean(mean) - float(whole.loss())) > 1e-3  # a mean of means would be another


def test_the_loss_of_a_document_does_not_depend_on_the_one_before_it():
    config, params = drafter()
    batch = packed(4 * HIDDEN)
    second = dataclasses.replace(batch, loss_mask=batch.loss_mask & (batch.segments == 2))
    other = dataclasses.replace(
        second,
        ids=jnp.where(second.segments == 1, 29, second.ids),
        features=jnp.where((second.segments == 1)[:, :, None], 7.0, second.features),
    )
    objective = objective_of(config)
    first, changed = terms_of(objective, params, second), terms_of(objective, params, other)
    jax.tree.map(np.testing.assert_array_equal, first, changed)


def test_teacher_tokens_that_cannot_be_drafted_are_reported_apart():
    config, params = drafter()
    batch = documents(2, 12, 4 * HIDDEN)
    terms = terms_of(objective_of(config), params, batch)
    logits = tiny_target().logits(batch.features[:, :, 3 * HIDDEN :].reshape(-1, HIDDEN))
    best = np.asarray(jnp.argmax(logits, axis=1)).reshape(2, 12)
    mask, segments = np.asarray(batch.loss_mask), np.asarray(batch.segments)
    supervised, known = np.zeros(3), np.zeros(3)
    for row in range(2):
        for t in range(12):
            for depth in range(3):
                end = t + 1 + depth
                if end < 12 and segments[row, t] and segments[row, end] and mask[row, t + depth]:
                    supervised[depth] += 1
                    known[depth] += best[row, end] in IDS
    metrics = {name: np.asarray(pair) for name, pair in terms.metrics.items()}
    np.testing.assert_array_equal(metrics["drafted"], [known, supervised])
    np.testing.assert_array_equal(metrics["accuracy"][1], supervised)
    np.testing.assert_array_equal(metrics["accuracy_of_drafted"][1], known)
    assert 0 < known[0] < supervised[0]
    np.testing.assert_array_equal(metrics["accuracy"][0], metrics["accuracy_of_drafted"][0])


def test_a_compact_teacher_says_what_the_whole_table_says():
    config, _ = drafter()
    target, states = tables(config), jax.random.normal(jax.random.key(0), (2, 9, HIDDEN))
    wanted = jnp.asarray([[0, 1, 0, 0, 0, 0, 0, 0, 1], [0, 0, 1, 1, 0, 0, 0, 0, 0]]) > 0
    teacher = jax.jit(lambda s: read_teacher(target, s, wanted, chunk=4))(states)
    whole = tiny_target().logits(states.reshape(-1, HIDDEN)).reshape(2, 9, -1)
    mask = np.asarray(wanted)
    normaliser = jax.nn.logsumexp(whole, axis=2)
    np.testing.assert_allclose(teacher.log_normaliser[mask], normaliser[mask], rtol=1e-6)
    np.testing.assert_array_equal(teacher.best[mask], jnp.argmax(whole, axis=2)[mask])
    index = jnp.asarray([np.flatnonzero(row)[:2] for row in mask], jnp.int32)
    labels = soft_labels(target, teacher, index)
    rows = np.repeat(np.arange(2), 2), np.asarray(index).reshape(-1)
    np.testing.assert_allclose(labels.logits, whole[rows][:, np.asarray(IDS)], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(labels.log_normaliser, normaliser[rows], rtol=1e-6)


def test_agreement_by_hand():
    """Target .5, .25, .25 of which the drafter has the first two and says .2, .8."""
    target = jnp.log(jnp.asarray([[0.5, 0.25, 0.25]]))
    labels = SoftLabels(
        logits=target[:, :2], log_normaliser=jnp.zeros((1,)), columns=jnp.zeros((1,), jnp.int32)
    )
    found = agreement(jnp.log(jnp.asarray([[0.2, 0.8]])), labels)
    np.testing.assert_allclose(found.acceptance, [0.2 + 0.25], rtol=1e-6)
    wanted = -(2 / 3 * np.log(0.2) + 1 / 3 * np.log(0.8))
    np.testing.assert_allclose(found.cross_entropy, [wanted], rtol=1e-6)
    assert found.known.tolist() == [True] and found.correct.tolist() == [False]


def largest_temporary(tokens, depths):
    """Bytes that a gradient step needs beside its arguments."""
    config, params = drafter()
    objective = objective_of(config, depths=depths, chunk=8)
    batch = documents(1, tokens, 4 * HIDDEN)
    trained, join = floating(params)

    def loss(trained):
        return objective.terms(join(trained), tables(config), batch).loss()

    return jax.jit(jax.grad(loss)).lower(trained).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.optimized
def test_memory_grows_with_the_text_and_not_with_the_depths_squared():
    few, many = largest_temporary(256, 1), largest_temporary(256, 4)
    scores = 4 * 256 * 256 * 4  # of one depth, float32
    assert many - few < scores  # with a mask over all depths it would be 15 times that


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depths": 0}, "depths: expected at least 1, got 0"),
        ({"decay": 0.0}, "decay: expected above 0"),
        ({"loss": "kl"}, "loss: expected one of cross_entropy, lk_alpha, lk_lambda"),
        ({"normaliser": "mean"}, "normaliser: expected one of tokens, specforge"),
    ],
)
def test_wrong_settings_are_named(unchecked, options, message):
    with pytest.raises(ValueError, match=message):
        objective_of(drafter()[0], **options)


def test_tables_and_features_that_do_not_fit_are_named():
    config, params = drafter()
    batch = documents(1, 12, 4 * HIDDEN)
    with pytest.raises(
        ValueError, match=r"target: expected DraftTables .* draft_vocab_size 12, got FrozenTarget"
    ):
        objective_of(config).terms(params, tiny_target(), batch)
    short = dataclasses.replace(batch, features=batch.features[:, :, HIDDEN:])
    with pytest.raises(
        ValueError, match=r"features: expected width 64 \(layer.0, layer.2, layer.4, final_norm; 16 each"
    ):
        objective_of(config).terms(params, tables(config), short)
    with pytest.raises(ValueError, match="config: expected an EAGLE-3 drafter, got"):
        objective_of(drafter("eagle")[0])
