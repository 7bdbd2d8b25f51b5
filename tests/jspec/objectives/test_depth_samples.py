import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_texts import drafter, packed, tables
from training_data import HIDDEN, documents

from jspec.drafters.eagle_net import eagle_net
from jspec.objectives.depth_samples import sample_depths, sample_sizes
from jspec.objectives.peagle import PEagleObjective, parallel_states
from jspec.objectives.rollouts import all_places, rollout_rows


@pytest.mark.parametrize("seed", range(3))
def test_a_sample_has_every_depth_before_each_row_and_the_sizes_of_the_rule(seed):
    batch = documents(2, 24, 4)
    uniforms = jax.random.uniform(jax.random.key(seed), (2, 4, 24))
    sample = sample_depths(batch, uniforms, ratio=0.7, least=0.2)
    for row in range(2):
        kept = np.asarray(sample.depths)[row] > 0
        anchors, depths = np.asarray(sample.anchors)[row][kept], np.asarray(sample.depths)[row][kept]
        pairs = set(zip(anchors.tolist(), depths.tolist(), strict=True))
        assert len(pairs) == kept.sum()
        assert all(depth == 1 or (anchor, depth - 1) in pairs for anchor, depth in pairs)
        supervised = int(rollout_rows(batch, all_places(batch), 0).supervised[row].sum())
        sizes = sample_sizes(supervised, depths=5, ratio=0.7, least=0.2)
        for depth, size in enumerate(sizes, start=1):
            learns = np.asarray(rollout_rows(batch, all_places(batch), depth).supervised)[row]
            assert learns[anchors[depths == depth]].all()
            eligible = learns if depth == 1 else learns & np.isin(np.arange(24), anchors[depths == depth - 1])
            assert (depths == depth).sum() == min(size, eligible.sum())


def test_own_rows_are_those_of_the_same_anchor():
    batch = documents(1, 24, 4)
    sample = sample_depths(batch, jax.random.uniform(jax.random.key(0), (1, 3, 24)), ratio=0.9, least=0.2)
    anchors, depths, own = (np.asarray(a)[0] for a in (sample.anchors, sample.depths, sample.own))
    for index in np.flatnonzero(depths):
        seen = own[index][own[index] >= 0]
        assert (anchors[seen] == anchors[index]).all()
        assert depths[seen].tolist() == list(range(1, depths[index] + 1))
    assert (own[depths == 0] == -1).all()


@pytest.mark.parametrize("window", [None, 2])
def test_a_row_sees_its_document_up_to_its_anchor_and_its_own_masks(window):
    config, params = drafter(mask_token_id=31, window=window)
    batch = packed(4 * HIDDEN)
    target = tables(config)
    sample = sample_depths(
        batch, jax.random.uniform(jax.random.key(0), (1, 2, batch.ids.shape[1])), ratio=1.0, least=1.0
    )
    direction = jax.random.normal(jax.random.key(2), (config.decoder.hidden_size,))

    def projections(features):
        return parallel_states(eagle_net(config, params), target, batch, features, sample)[0] @ direction

    read = batch.features[:, :, : config.features_size]
    influence = np.any(np.asarray(jax.jit(jax.jacrev(projections))(read))[:, 0] != 0, axis=2)
    tokens = batch.ids.shape[1]
    anchors, depths = np.asarray(sample.anchors)[0], np.asarray(sample.depths)[0]
    assert (depths > 1).any()
    for index in np.flatnonzero(depths):
        start = 0 if anchors[index] < 7 else 7
        if window is not None:  # the row itself is the last of its positions
            start = max(start, anchors[index] + depths[index] - window + 1)
        seen = np.flatnonzero(influence[tokens + index]).tolist()
        assert seen == list(range(start, anchors[index] + 1))


def test_the_loss_over_a_drawn_sample_is_finite_and_counts_its_rows():
    config, params = drafter(mask_token_id=31)
    batch = documents(2, 24, 4 * HIDDEN)
    objective = PEagleObjective(config=config, depths=3, chunk=16)
    terms = jax.jit(objective.__call__)(params, tables(config), batch, jax.random.key(0))
    sample = objective.choose(batch, jax.random.key(0))
    counts = [(np.asarray(sample.depths) == depth).sum() for depth in (1, 2)]
    assert np.isfinite(terms.loss())
    np.testing.assert_array_equal(terms.metrics["drafted"][1][1:], counts)


def test_ratios_out_of_range_are_named():
    with pytest.raises(ValueError, match="ratio: expected above 0 and at most 1, got 2"):
        sample_depths(documents(1, 8, 4), jnp.zeros((1, 2, 8)), ratio=2.0, least=0.2)
