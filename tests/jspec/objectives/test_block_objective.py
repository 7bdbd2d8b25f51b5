import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_data import HIDDEN, VOCABULARY, documents, tiny_drafter, tiny_target

from jspec.drafters.dflash import dflash_net
from jspec.objectives.batch import on_devices
from jspec.objectives.block_pass import training_hidden
from jspec.objectives.blocks import Blocks, block_targets, choose_anchors, eligible_anchors
from jspec.objectives.dflash import DFlashObjective, SelectorTerm
from jspec.objectives.frozen import draft_tables
from jspec.objectives.live_chunks import summed_over_live_chunks
from jspec.objectives.weights import dpace_weights
from jspec_train.recipe_parts import DrafterPart

WIDTH = 2 * HIDDEN


def one_document(ids, mask):
    ids, mask = np.asarray(ids, np.int32), np.asarray(mask, bool)
    index = np.arange(len(ids), dtype=np.int32)
    features = np.zeros((1, len(ids), 1), np.float32)
    return on_devices(
        dict(
            ids=ids[None],
            loss_mask=mask[None],
            segments=np.ones((1, len(ids)), np.int32),
            positions=index[None],
            features=features,
        )
    )


def test_an_anchor_is_supervised_and_so_is_the_token_after_it():
    batch = one_document([5, 6, 7, 8, 9, 10], [0, 1, 1, 0, 1, 1])
    assert np.asarray(eligible_anchors(batch)).tolist() == [[False, True, False, False, True, False]]


def test_a_row_predicts_the_token_at_its_place_until_the_document_ends():
    batch = one_document([5, 6, 7, 8, 9, 10], [0, 1, 1, 0, 1, 1])
    blocks = Blocks(anchors=jnp.array([[1, 4]]), keep=jnp.array([[True, True]]))
    targets = block_targets(batch, blocks, block_size=4)
    assert np.asarray(targets.labels[0, 0]).tolist() == [6, 7, 8, 9]
    assert np.asarray(targets.predecessors[0, 0]).tolist() == [6, 6, 7, 8]
    assert np.asarray(targets.positions[0]).tolist() == [[1, 2, 3, 4], [4, 5, 6, 7]]
    # Row 0 predicts nothing, token 8 is not supervised, and the second block runs past the text.
    assert np.asarray(targets.mask[0]).tolist() == [[False, True, False, True], [False, True, False, False]]


def test_anchors_are_different_and_as_many_as_there_are():
    batch = documents(5, 24, 1, seed=3)
    blocks = choose_anchors(batch, jax.random.uniform(jax.random.key(0), batch.ids.shape), num_anchors=23)
    eligible = np.asarray(eligible_anchors(batch))
    for row in range(5):
        chosen = np.asarray(blocks.anchors[row])[np.asarray(blocks.keep[row])]
        assert sorted(chosen) == list(np.flatnonzero(eligible[row]))
    with pytest.raises(ValueError, match="num_anchors: expected 1 to 23 for rows of 24 tokens, got 24"):
        choose_anchors(batch, jnp.zeros(batch.ids.shape), num_anchors=24)


def hidden_of(batch, blocks, drafter=None):
    config, params = drafter or tiny_drafter()
    targets = block_targets(batch, blocks, block_size=config.block_size)
    return np.asarray(
        training_hidden(dflash_net(config, params), tiny_target().embed, batch, blocks, targets)
    )


def test_a_block_sees_no_feature_and_no_token_from_its_anchor_on():
    batch = documents(1, 20, WIDTH)
    blocks = Blocks(anchors=jnp.array([[6, 10]]), keep=jnp.array([[True, True]]))
    before = hidden_of(batch, blocks)
    later = dataclasses.replace(
        batch, features=batch.features.at[:, 10:].set(7.0), ids=batch.ids.at[:, 11:].set(3)
    )
    np.testing.assert_array_equal(hidden_of(later, blocks), before)
    for place, changed in ((9, [False, True]), (5, [True, True])):
        seen = dataclasses.replace(batch, features=batch.features.at[:, place].add(1.0))
        got = [not np.array_equal(a, b) for a, b in zip(hidden_of(seen, blocks)[0], before[0], strict=True)]
        assert got == changed


def test_documents_packed_into_a_row_train_as_they_do_alone():
    alone = documents(2, 16, WIDTH, seed=5)
    lengths = np.asarray(alone.segments.sum(1))
    packed = jax.tree.map(lambda a: jnp.concatenate([a[0, : lengths[0]], a[1, : lengths[1]]])[None], alone)
    packed = dataclasses.replace(packed, segments=jnp.asarray(np.repeat([1, 2], lengths), jnp.int32)[None])
    config, params = tiny_drafter()
    objective = DFlashObjective(config=config, gamma=2.0)

    def terms(batch):
        zeros = jnp.zeros(batch.ids.shape)
        blocks = choose_anchors(batch, zeros, num_anchors=batch.ids.shape[1] - 1)
        return objective.terms(params, tiny_target(), batch, blocks)

    a, b = terms(alone), terms(packed)
    np.testing.assert_allclose(a.numerator, b.numerator, rtol=1e-5)
    np.testing.assert_allclose(a.denominator, b.denominator, rtol=1e-6)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_change_neither_loss_nor_gradients(chunk):
    part = DrafterPart(
        num_layers=1, block_size=4, intermediate_size=24,
        convolution={"taps": 2, "group_size": 4}, selector={"rank": 3, "top_k": 4},
    )  # fmt: skip
    config, params = tiny_drafter(part)
    batch, target = documents(2, 20, WIDTH), tiny_target()

    def loss(params, chunk, recompute):
        objective = DFlashObjective(config=config, num_anchors=7, chunk_blocks=chunk, recompute=recompute)
        return objective(params, target, batch, jax.random.key(1)).loss()

    want, want_grads = jax.value_and_grad(loss)(params, 1000, False)
    got, grads = jax.value_and_grad(loss)(params, chunk, True)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for a, b in zip(grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6)


@pytest.mark.optimized
def test_memory_does_not_grow_with_anchors_times_vocabulary():
    def temporary(items, chunk):
        def loss(table, rows):
            def sums(table, _, piece):
                return jnp.sum(jax.nn.logsumexp(piece @ table, axis=-1)), {}

            live = jnp.ones(items, jnp.bool_)
            return summed_over_live_chunks(sums, table, None, rows, live, chunk=chunk)[0]

        table, rows = jnp.zeros((8, 5000)), jnp.zeros((items, 8))
        compiled = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(table, rows).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    few, many = temporary(64, 16), temporary(1024, 16)
    assert many - few < 1024 * 8 * 4 * 8  # the rows themselves, a few times; logits would be 19 MB


def test_a_label_that_cannot_be_drafted_has_no_weight_but_counts_as_missed():
    part = DrafterPart(num_layers=1, block_size=4, intermediate_size=24, vocabulary=VOCABULARY - 4)
    config, _ = tiny_drafter(DrafterPart(num_layers=1, block_size=4, intermediate_size=24))
    reduced = dataclasses.replace(config, draft_vocab_size=part.vocabulary)
    ids = jnp.arange(4, VOCABULARY, dtype=jnp.int32)  # 0 to 3 are left out
    from jspec.drafters.dflash_init import init_dflash_params

    params = init_dflash_params(reduced, jax.random.key(0), jnp.float32, draft_ids=ids)
    target, batch = tiny_target(), documents(2, 20, WIDTH)
    tables = draft_tables(target, HIDDEN, ids, VOCABULARY)
    blocks = choose_anchors(batch, jnp.zeros(batch.ids.shape), num_anchors=8)
    objective = DFlashObjective(config=reduced)
    terms = objective.terms(params, tables, batch, blocks)
    targets = block_targets(batch, blocks, block_size=4)
    mask, labels = np.asarray(targets.mask), np.asarray(targets.labels)
    assert (
        terms.denominator == (mask & (labels >= 4)).sum() < mask.sum() == np.sum(terms.metrics["accuracy"][1])
    )
    # The loss is the cross-entropy over the ids that are left.
    hidden = hidden_of(batch, blocks, (reduced, params))
    logits = np.asarray(target.logits(jnp.asarray(hidden.reshape(-1, HIDDEN)))).reshape(*labels.shape, -1)[
        ..., 4:
    ]
    log_probs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    kept = mask & (labels >= 4)
    want = -np.take_along_axis(log_probs, np.maximum(labels - 4, 0)[..., None], axis=-1)[..., 0][kept].sum()
    np.testing.assert_allclose(terms.numerator, want, rtol=1e-5)


def test_dpace_by_hand():
    probs, mask = jnp.array([[0.5, 0.2, 0.8]]), jnp.array([[True, False, True]])
    # s = 0.75, 1, 0.9; survival 0.75, 0.75, 0.675
    cases = {
        "dpace_cumulative": [0.75, 0, 0.675],
        "dpace": [1.425, 0, 0.675],
        "dpace_continuation": [1.9, 0, 1.0],
    }
    for form, want in cases.items():
        got = dpace_weights(probs, mask, alpha=0.5, form=form)
        np.testing.assert_allclose(got[0], want, rtol=1e-6)


def test_the_selector_comes_in_after_its_warm_up():
    term = SelectorTerm(alpha=2.0, warmup_ratio=0.1, ramp_ratio=0.2)
    got = [float(term.at(step, 100)) for step in (0, 9, 10, 19, 29, 30, 99)]
    np.testing.assert_allclose(got, [0, 0, 0.1, 1.0, 2.0, 2.0, 2.0], rtol=1e-6)
    assert SelectorTerm().at(0, 10) == 1.0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gamma": 0.0}, "gamma: expected a positive number or None, got 0.0"),
        ({"weighting": "dpace", "gamma": 2.0}, "gamma: expected None with weighting 'dpace', got 2.0"),
        ({"chunk_blocks": 0}, "chunk_blocks: expected at least 1, got 0"),
        ({"dpace_alpha": 1.5}, "dpace_alpha: expected 0 to 1, got 1.5"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, message):
    config, _ = tiny_drafter()
    with pytest.raises(ValueError, match=message):
        DFlashObjective(config=config, **options)
