"""DSpark's and Domino's losses: what each row sees and learns, exact sums, reduced vocabularies, D-PARD."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from training_data import HIDDEN, VOCABULARY, documents, target_config, tiny_target

from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash_init import dflash_config_for, init_dflash_params
from jspec.drafters.domino_head import Gru
from jspec.drafters.dspark_heads import Confidence, Markov
from jspec.objectives.batch import TrainBatch
from jspec.objectives.blocks import Blocks, block_targets
from jspec.objectives.dflash import DFlashObjective
from jspec.objectives.domino import DominoObjective
from jspec.objectives.dspark import DSparkObjective, calibration_error
from jspec.objectives.frozen import draft_tables
from jspec.objectives.terms import add

WIDTH, DRAFTS = 2 * HIDDEN, 4
DSPARK = dict(head=Markov(rank=3, kind="rnn"), confidence=Confidence(reads_token=True), anchor_predicts=True)
DOMINO = dict(head=Gru(size=5, rank=3), anchor_predicts=True)


def drafter(ids=None, **changes):
    config = dflash_config_for(
        target_config(),
        block_size=DRAFTS,
        mask_token_id=VOCABULARY - 1,
        target_layer_ids=(1, 3),
        intermediate_size=24,
        draft_vocab_size=None if ids is None else len(ids),
        **{**DSPARK, **changes},
    )
    return config, init_dflash_params(
        config, jax.random.key(1), jnp.float32, draft_ids=ids, initializer_range=0.3
    )


def batch_of(rows: int, tokens: int, states: bool = True) -> TrainBatch:
    return documents(rows, tokens, WIDTH + HIDDEN * states)


def one_block(anchor: int) -> Blocks:
    return Blocks(anchors=jnp.array([[anchor]]), keep=jnp.array([[True]]))


@functools.cache
def compiled(objective):
    """Its terms as one program: eagerly, every operation would be compiled on its own."""
    return jax.jit(objective.terms)


def per_row(objective, params, target, batch, blocks):
    """Cross-entropy, acceptance and confidence error of every draft token of a single block."""
    metrics = compiled(objective)(params, target, batch, blocks).metrics
    return np.stack([metrics[name][0] for name in ("cross_entropy", "acceptance", "confidence_error")])


def test_a_predicting_anchor_learns_the_next_token():
    batch = documents(1, 12, 1)
    batch = dataclasses.replace(
        batch,
        ids=jnp.arange(12, dtype=jnp.int32)[None] + 10,
        loss_mask=jnp.asarray([[0, 0, 0, 0, 1, 1, 1, 0, 1, 1, 1, 1]], bool),
        segments=jnp.ones((1, 12), jnp.int32),
    )
    blocks = Blocks(anchors=jnp.array([[4, 9]]), keep=jnp.array([[True, True]]))
    targets = block_targets(batch, blocks, block_size=4, anchor_predicts=True)
    assert np.asarray(targets.labels[0, 0]).tolist() == [15, 16, 17, 18]
    assert np.asarray(targets.predecessors[0, 0]).tolist() == [14, 15, 16, 17]
    assert np.asarray(targets.before[0, 0]).tolist() == [4, 5, 6, 7]
    # Token 7 is not supervised, and the second block runs past the text.
    assert np.asarray(targets.mask[0]).tolist() == [[True, True, False, True], [True, True, False, False]]


@pytest.mark.parametrize(
    "changes", [{}, dict(anchor_predicts=False)], ids=["anchor predicts", "row 0 dropped"]
)
def test_a_row_learns_from_its_own_token_and_state_alone(changes):
    config, params = drafter(**changes)
    objective, target = DSparkObjective(config=config), tiny_target()
    batch, anchor, drafts = batch_of(1, 24), 6, config.longest_draft
    batch = dataclasses.replace(
        batch, loss_mask=jnp.ones_like(batch.loss_mask), segments=jnp.ones_like(batch.segments)
    )
    run = lambda batch: per_row(objective, params, target, batch, one_block(anchor))  # noqa: E731
    before = run(batch)
    for draft in range(drafts):
        place = anchor + 1 + draft
        other = dataclasses.replace(batch, ids=batch.ids.at[0, place].add(1))
        changed = np.abs(run(other) - before) > 1e-7
        # The label of its row; the token before of all later ones (the head has a state).
        assert changed[0].tolist() == [d >= draft for d in range(drafts)]
        assert changed[1].tolist() == [d > draft for d in range(drafts)]
        state = dataclasses.replace(batch, features=batch.features.at[0, place - 1, WIDTH:].add(1.0))
        changed = np.abs(run(state) - before) > 1e-7
        assert changed[0].tolist() == [False] * drafts
        assert changed[1].tolist() == changed[2].tolist() == [d == draft for d in range(drafts)]
    later = dataclasses.replace(
        batch,
        ids=batch.ids.at[0, anchor + 1 + drafts :].set(3),
        features=batch.features.at[0, anchor:, :WIDTH].set(7.0).at[0, anchor + drafts :].set(7.0),
    )
    np.testing.assert_array_equal(run(later), before)


def test_a_block_counts_up_to_its_first_unsupervised_token_in_dspark_only():
    batch = batch_of(1, 24)
    mask = jnp.ones_like(batch.loss_mask).at[0, 9].set(False)
    batch = dataclasses.replace(batch, loss_mask=mask, segments=jnp.ones_like(batch.segments))
    config, params = drafter()
    terms = compiled(DSparkObjective(config=config))(params, tiny_target(), batch, one_block(6))
    assert np.asarray(terms.metrics["accuracy"][1]).tolist() == [1, 1, 0, 0]
    assert terms.denominator == 2 and terms.metrics["tau_probabilistic"][1] == 1
    config, params = drafter(**DOMINO, confidence=None)
    own = dataclasses.replace(batch, features=batch.features[:, :, :WIDTH])
    terms = compiled(DominoObjective(config=config))(params, tiny_target(), own, one_block(6))
    assert np.asarray(terms.metrics["accuracy"][1]).tolist() == [1, 1, 0, 1]


@pytest.mark.parametrize("kind", ["dspark", "domino"])
def test_chunks_and_micro_batches_change_neither_loss_nor_gradients(kind):
    config, params = drafter(**DOMINO, confidence=None) if kind == "domino" else drafter()
    make = DominoObjective if kind == "domino" else DSparkObjective
    batch, target = batch_of(4, 20, kind != "domino"), tiny_target()
    whole = make(config=config, chunk_blocks=1000, recompute=False)
    parts = make(config=config, chunk_blocks=3, recompute=True)
    blocks = whole.choose(batch, jax.random.key(0))

    def grads_of(objective):
        def loss(params, piece, chosen):
            terms = objective.terms(params, target, piece, chosen)
            return terms.numerator, terms

        return jax.jit(jax.value_and_grad(loss, has_aux=True))

    (_, want), want_grads = grads_of(whole)(params, batch, blocks)
    run = grads_of(parts)
    halves = [
        run(params, *(jax.tree.map(lambda a, r=rows: a[r], tree) for tree in (batch, blocks)))
        for rows in (slice(0, 2), slice(2, 4))
    ]
    terms = add(halves[0][0][1], halves[1][0][1])
    np.testing.assert_allclose(terms.loss(), want.loss(), rtol=1e-5)
    for name, (total, count) in want.metrics.items():
        np.testing.assert_allclose(terms.metrics[name][0], total, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(terms.metrics[name][1], count, rtol=1e-5)
    for a, b, c in zip(halves[0][1], halves[1][1], want_grads, strict=True):
        np.testing.assert_allclose(a + b, c, rtol=1e-4, atol=1e-4)


def test_no_gradient_reaches_the_target_and_the_confidence_reaches_the_backbone():
    config, params = drafter()
    batch, target = batch_of(2, 20), tiny_target()
    objective = DSparkObjective(config=config)
    blocks = objective.choose(batch, jax.random.key(0))

    def loss(features, tables, params, weight):
        own = dataclasses.replace(batch, features=features)
        weighted = dataclasses.replace(objective, confidence_weight=weight)
        return weighted.terms(params, dataclasses.replace(target, params=tables), own, blocks).numerator

    gradients = jax.jit(jax.grad(loss, argnums=(0, 1, 2)), static_argnums=3)
    features, tables, with_confidence = gradients(batch.features, target.params, params, 1.0)
    assert np.abs(features[:, :, :WIDTH]).max() > 0
    assert not np.any(features[:, :, WIDTH:]) and not any(np.any(g) for g in tables)
    without = gradients(batch.features, target.params, params, 0.0)[2]
    leaves = [leaf.path for leaf in dflash_leaves(config, jnp.dtype(jnp.float32))]
    moved = {
        name
        for name, a, b in zip(leaves, with_confidence, without, strict=True)
        if np.abs(a - b).max() > 1e-7
    }
    assert {"fc", "head.embedding", "confidence_head.weight"} <= moved
    assert not moved & {"head.output", "head.mix"}  # its goal is a constant


def test_undraftable_ids_are_the_targets_alone():
    ids = jnp.arange(4, VOCABULARY, dtype=jnp.int32)  # 0 to 3 are left out
    config, params = drafter(ids)
    batch, target = batch_of(2, 20), tiny_target()
    tables = draft_tables(target, HIDDEN, ids, VOCABULARY)
    objective = DSparkObjective(config=config)
    blocks = objective.choose(batch, jax.random.key(0))
    terms = compiled(objective)(params, tables, batch, blocks)
    # The same drafter of the whole vocabulary, that can never draft these ids.
    whole, wide = drafter()
    float32 = jnp.dtype(jnp.float32)
    narrow = {leaf.path: p for leaf, p in zip(dflash_leaves(config, float32), params, strict=True)}
    narrow["head.output"] = jnp.zeros((3, VOCABULARY)).at[:, ids].set(narrow["head.output"])
    wide = tuple(narrow[leaf.path] for leaf in dflash_leaves(whole, float32))

    @jax.tree_util.register_static
    class Barred:
        """Bars ids 0 to 3 where the drafter's head is called, which is first; then comes the target's."""

        def __init__(self):
            self.calls, self.embed = 0, target.embed

        def logits(self, hidden):
            self.calls += 1
            out = target.logits(hidden)
            return out.at[:, :4].set(-1e9) if self.calls % 2 else out

    masked = Barred()
    expected = jax.jit(
        lambda: DSparkObjective(config=whole, cross_entropy_weight=0.0).terms(wide, masked, batch, blocks)
    )()
    for name in ("l1_loss", "acceptance", "tau_probabilistic", "confidence_loss"):
        np.testing.assert_allclose(terms.metrics[name][0], expected.metrics[name][0], rtol=2e-5)
        np.testing.assert_allclose(terms.metrics[name][1], expected.metrics[name][1])


def test_dpard_by_hand():
    config, params = drafter()
    batch, target = batch_of(1, 24), tiny_target()
    batch = dataclasses.replace(
        batch, loss_mask=jnp.ones_like(batch.loss_mask), segments=jnp.ones_like(batch.segments)
    )
    plain = DSparkObjective(config=config, cross_entropy_weight=0.0, l1_weight=1.0, confidence_weight=0.0)
    accept = np.asarray(
        compiled(plain)(params, target, batch, one_block(6)).metrics["acceptance"][0], np.float64
    )
    terms = compiled(DSparkObjective(config=config, loss="dpard", confidence_weight=0.0))(
        params, target, batch, one_block(6)
    )
    survival = np.cumprod(0.5 * accept + 0.5)
    weights = np.cumsum(survival[::-1])[::-1]
    np.testing.assert_allclose(terms.denominator, weights.sum(), rtol=1e-5)
    # Bhattacharyya: 1 - TV <= sum sqrt(p q) <= sqrt(1 - TV^2), row by row.
    lower, upper = -np.log(1 - (1 - accept) ** 2), -2 * np.log(accept)
    assert (weights * lower).sum() - 1e-4 <= terms.numerator <= (weights * upper).sum() + 1e-4


def test_calibration_error_by_hand():
    config, params = drafter()
    batch, target = batch_of(1, 24), tiny_target()
    objective = DSparkObjective(config=config)
    terms = compiled(objective)(params, target, batch, objective.choose(batch, jax.random.key(0)))
    confidence, counts = (np.asarray(x) for x in terms.metrics["binned_confidence"])
    acceptance, used = np.asarray(terms.metrics["binned_acceptance"][0]), counts > 0
    assert counts.sum() == np.sum(terms.metrics["acceptance"][1]) and used.sum() > 1
    gaps = np.abs(confidence[used] / counts[used] - acceptance[used] / counts[used])
    np.testing.assert_allclose(calibration_error(terms), np.average(gaps, weights=counts[used]), rtol=1e-5)
    bias = np.sum(terms.metrics["confidence_bias"][0])
    np.testing.assert_allclose(np.sum(confidence - acceptance), bias, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DSparkObjective(config=drafter(**DOMINO, confidence=None)[0]),
            "config: expected a DSpark drafter",
        ),
        (lambda: DominoObjective(config=drafter()[0]), "config: expected a Domino drafter"),
        (lambda: DFlashObjective(config=drafter()[0]), "config: expected a DFlash or DFlash 2 drafter"),
        (lambda: DSparkObjective(config=drafter()[0], gamma=-1.0), "gamma: expected a positive number"),
        (lambda: DSparkObjective(config=drafter()[0], l1_weight=-1.0), "l1_weight: expected at least 0"),
        (
            lambda: DSparkObjective(config=drafter()[0], l1_weight=0.0, cross_entropy_weight=0.0),
            "cross_entropy_weight, l1_weight: expected one above 0",
        ),
        (
            lambda: DSparkObjective(config=drafter()[0], loss="dpard", gamma=2.0),
            "gamma: expected None with loss",
        ),
        (
            lambda: DSparkObjective(config=drafter()[0], dpard_alpha=1.0),
            "dpard_alpha: expected between 0 and 1",
        ),
        (
            lambda: DominoObjective(config=drafter(**DOMINO, confidence=None)[0], base_ratio=1.5),
            "base_ratio: expected 0 to 1",
        ),
    ],
)
def test_settings_that_mean_nothing_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_features_of_another_width_are_named():
    config, params = drafter()
    objective = DSparkObjective(config=config)
    with pytest.raises(
        ValueError, match=r"features: expected width 48 \(layer.1, layer.3, final_norm; 16 each\), got 32"
    ):
        objective(params, tiny_target(), batch_of(1, 20, False), jax.random.key(0))
