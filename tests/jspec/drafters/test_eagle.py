"""EAGLE drafters against drafts computed without a cache, and their state against a clean rebuild."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from block_engine import VOCABULARY
from eagle_engine import WINDOW_ROPE, Engine, config, paths_of, weights

from jspec.coins import coupled_noise
from jspec.drafters.eagle import eagle
from jspec.drafters.eagle_net import eagle_net
from jspec.drafters.tree_shape import dynamic_tree, static_tree
from jspec.targets.rope import Linear, Llama3, Rope, Yarn, inverse_frequencies

TREE = dynamic_tree(width=3, depth=3, draft_length=7)
FIXED = static_tree([[0], [1], [0, 0], [0, 1], [1, 0], [0, 1, 0]])
EVERYTHING = config(
    layers=2,
    draft_vocab_size=9,
    own_head=True,
    own_embedding=True,
    feature_norms=True,
    feeds_back_norm=True,
    norm_before_residual=True,
)
EVERYTHING_IN_WINDOWS = dataclasses.replace(
    EVERYTHING,
    decoder=dataclasses.replace(
        EVERYTHING.decoder, layer_kinds=("full", "window"), window=3, window_rope=WINDOW_ROPE
    ),
)
KINDS = {
    "eagle": (config(kind="eagle", fc_bias=True, layers=2), None),
    "eagle-tree": (config(kind="eagle"), TREE),
    "eagle3": (config(draft_vocab_size=9, norm_before_fc=True), None),
    "eagle3-tree": (EVERYTHING, TREE),
    "deepspec": (config(layers=2, wide_layers="all", norm=True, head_reads_norm=False), FIXED),
    # Windows shorter than context and draft, in a wide and a plain layer.
    "eagle3-window": (config(layers=2, kinds=("window", "full"), window=2), None),
    "eagle3-window-tree": (EVERYTHING_IN_WINDOWS, TREE),
    "peagle": (config(layers=2, mask_token_id=3), None),
    "peagle-window": (config(layers=2, kinds=("full", "window"), window=2, mask_token_id=3), None),
    "peagle-tree": (config(mask_token_id=3, own_head=True), TREE),
}


def engine(name: str, page_order: int = 0) -> Engine:
    kind, tree = KINDS[name]
    return Engine(eagle(kind, draft_length=3 if tree is None else None, tree=tree), weights(kind), page_order)


@pytest.mark.parametrize("name", KINDS)
def test_drafts_are_those_of_a_pass_without_a_cache(name):
    made = engine(name)
    made.admit(0, 1)
    made.admit(2, 5)
    made.commit([0, 2], [8, 3], rejected=1)
    assert made.commit([2], [2], rejected=4, scattered=True) == [made.drafter.draft_length]
    proposal = made.draft(2, 0)
    assert proposal.lengths.tolist() == [made.drafter.draft_length] * 2 + [0]
    assert proposal.confidence is not None
    for lane, slot in enumerate((2, 0)):
        paths = paths_of(proposal, lane)
        assert len(set(paths)) == len(paths)
        assert max(len(path) for path in paths) <= made.drafter.draft_depth
        for index, path in enumerate(paths):
            probs = made.rollout(slot, path[:-1])
            assert np.sum(probs > probs[path[-1]] + 1e-6) < made.drafter.shape.width
            assert abs(float(proposal.confidence[lane, index]) - probs[path[-1]]) < 1e-5


@pytest.mark.parametrize("name", ["eagle", "eagle3-tree", "eagle3-window"])
def test_state_equals_a_clean_rebuild_after_every_round(name):
    made = engine(name, page_order=1)
    made.admit(1, 9)
    made.admit(0, 2)
    made.commit([1, 0], [7, 4], rejected=3)
    idle = made.held(0)
    made.admit(1, 4)  # the slot goes to another request
    # A chunk, then accepts of every length from 0 on (the anchor is one more), chains and trees.
    for count, scattered in ((5, False), (1, False), (4, True), (2, True), (3, False), (1, True), (6, False)):
        made.commit([0, 1, -1], [0, count, 0], rejected=3, scattered=scattered)
        rebuilt = engine(name)
        rebuilt.admit(1, 4)
        for part in range(0, int(made.cache.lengths[1]), 12):
            rebuilt.commit([1], [min(12, int(made.cache.lengths[1]) - part)])
        for held, expected in zip(made.held(1), rebuilt.held(1), strict=True):
            np.testing.assert_allclose(held, expected, atol=1e-5, rtol=1e-5)
    for held, before in zip(made.held(0), idle, strict=True):
        np.testing.assert_array_equal(held, before)


def test_rejected_and_padding_rows_are_nowhere():
    made = engine("eagle3-tree")
    made.admit(0, 1)
    made.admit(1, 2)
    made.commit([0, -1, 1], [4, 2, 3], rejected=3, scattered=True)
    for array in jax.tree.leaves(made.state):
        assert np.isfinite(array).all()
    rows = np.any(np.asarray(made.state.pages.v) != 0, axis=(0, 2, 4))
    assert np.count_nonzero(rows) == 7  # as many as pairs


def test_padding_lanes_and_free_slots_change_nothing():
    made = engine("eagle3-tree")
    made.admit(1, 1)
    made.commit([1], [7])
    alone = made.draft(1)
    table = made.cache.groups[0].page_table[1]
    poison = jax.tree.map(lambda leaf: jnp.full_like(leaf, jnp.nan), made.state.pages)
    pages = jax.tree.map(lambda new, old: new.at[:, table].set(old[:, table]), poison, made.state.pages)
    states = jnp.full_like(made.state.states, jnp.nan).at[1].set(made.state.states[1])
    made.state = dataclasses.replace(made.state, pages=pages, states=states)
    among = made.draft(-1, 1, -1)
    assert among.lengths.tolist() == [0, made.drafter.draft_length, 0]
    assert among.tokens[1].tolist() == alone.tokens[0].tolist()


def test_slots_in_any_lane_keep_their_own():
    one, other = engine("eagle3-tree"), engine("eagle3-tree", page_order=3)
    for made in (one, other):
        made.admit(0, 1)
        made.admit(2, 2)
    one.commit([0, 2], [6, 4])
    other.commit([2, -1, 0], [4, 0, 6], rejected=2)
    tokens = other.draft(-1, 2, 0).tokens
    assert one.draft(0, 2).tokens[:2].tolist() == [tokens[2].tolist(), tokens[1].tolist()]


def test_seeded_requests_draft_as_their_noise_draws():
    made = engine("eagle3")
    made.admit(0, 1)
    made.admit(1, 1)
    made.commit([0, 1], [6, 6])
    greedy = made.draft(0, 1)
    made.sampling = dataclasses.replace(
        made.sampling,
        temperature=made.sampling.temperature.at[1].set(0.8),
        seeded=made.sampling.seeded.at[1].set(True),
        seeds=made.sampling.seeds.at[1].set(11),
    )
    proposal = made.draft(0, 1)
    assert proposal.tokens[0].tolist() == greedy.tokens[0].tolist()
    path: list[int] = []
    for depth in range(3):
        noise = coupled_noise(jnp.array([11], jnp.uint32), jnp.array([7 + depth]), VOCABULARY)[0]
        with np.errstate(divide="ignore"):
            scores = np.log(made.rollout(1, path)) / 0.8 + np.asarray(noise)
        path.append(int(np.argmax(scores)))
    assert proposal.tokens[1].tolist() == path


def test_a_text_past_the_drafters_limit_is_not_drafted():
    kind = dataclasses.replace(
        KINDS["eagle3"][0], decoder=dataclasses.replace(KINDS["eagle3"][0].decoder, max_context=8)
    )
    made = Engine(eagle(kind, draft_length=3), weights(kind))
    made.admit(0, 1)
    made.admit(1, 2)
    assert made.commit([0, 1], [6, 7]) == [3, 0]
    assert made.draft(0, 1).lengths.tolist() == [3, 0, 0]


def test_broken_rows_end_the_proposal():
    made = engine("eagle3")
    made.admit(0, 1)
    made.commit([0], [5])
    made.state = dataclasses.replace(made.state, states=jnp.full_like(made.state.states, jnp.nan))
    assert made.draft(0).lengths.tolist() == [1, 0, 0]  # the prepared candidate is sound


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (dict(num_target_layers=5), "layers 5, not 6"),
        (dict(num_target_layers=None, features=("layer.1", "layer.7")), r"states \[7\] .* layers 0 to 5"),
    ],
)
def test_another_target_is_refused_with_both_sides(change, problem):
    kind = config(**change)
    with pytest.raises(ValueError, match=problem) as refusal:
        Engine(eagle(kind), weights(kind))
    assert "arrays, 6 layers" in str(refusal.value) and "EAGLE-3" in str(refusal.value)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (dict(draft_length=2, tree=TREE), "draft_length: expected None with a tree.* got 2"),
        (dict(draft_length=0), "expected at least 1, got 0"),
        (dict(tree=dynamic_tree(width=10, depth=2, draft_length=3)), "tree: expected at most 9 .* got 10"),
    ],
)
def test_impossible_drafts_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        eagle(KINDS["eagle3"][0], **options)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (dict(kind="eagle", features=("layer.1", "layer.2")), "features: expected one state of width 12"),
        (dict(kind="eagle", head_reads_norm=True), "head_reads_norm: expected False for EAGLE, got True"),
        (dict(feature_norms=True, norm_before_fc=True), "norm_before_fc: expected False with feature_norms"),
        (dict(draft_vocab_size=17), "draft_vocab_size: expected 2 to the vocabulary's 16.* got 17"),
        (dict(mask_token_id=16), "mask_token_id: expected 0 to 15, got 16"),
        (dict(features=("layer.6",)), "layer 6 does not exist; the model has 6 layers"),
        (dict(kinds=("window",)), "window: expected at least 1 and a window_rope"),
    ],
)
def test_impossible_configs_are_refused(options, problem):
    with pytest.raises(ValueError, match=problem):
        config(**options)


@pytest.mark.parametrize(
    "rope",
    [
        Rope(theta=100.0),
        Rope(theta=100.0, scaling=Linear(factor=3.0)),
        Rope(
            theta=100.0,
            scaling=Llama3(factor=4.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=8),
        ),
        Rope(theta=100.0, scaling=Yarn(factor=4.0, original_context=8, attention_factor=1.2)),
    ],
    ids=lambda rope: type(rope.scaling).__name__,
)
def test_every_layer_turns_by_its_kinds_rope(rope):
    """Rows that differ in their position alone: their keys are those of position 0, turned."""
    kind = config(layers=2, kinds=("full", "window"), window=3, rope=rope)
    net, rows = eagle_net(kind, weights(kind)), jnp.ones((5, 12), jnp.float32)
    positions = jnp.array([0, 1, 2, 7, 20])
    _, k, _ = net.step(rows, rows, positions, lambda layer: lambda q, k, v: jnp.zeros_like(q))
    for layer, own in ((0, rope), (1, WINDOW_ROPE)):
        factor = own.scaling.attention_factor if isinstance(own.scaling, Yarn) else 1.0
        turn = np.exp(1j * np.asarray(positions)[:, None] * inverse_frequencies(own, 4)[None].astype(float))
        pairs = np.asarray(k[layer, :, :, :2]) + 1j * np.asarray(k[layer, :, :, 2:])
        plain = pairs[:1] / factor  # at position 0 only the factor counts
        np.testing.assert_allclose(pairs, factor * plain * turn[:, None], atol=1e-5)
        assert np.abs(np.diff(pairs, axis=0)).max() > 0.1


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize(
    "options", [dict(draft_length=1), dict(tree=dynamic_tree(width=2, depth=1, draft_length=1))]
)
def test_the_smallest_drafts_need_no_pass(kind, options):
    made = Engine(eagle(KINDS[kind][0], **options), weights(KINDS[kind][0]))
    made.admit(0, 1)
    made.commit([0], [1])
    proposal = made.draft(0)
    assert proposal.lengths.tolist() == [1, 0, 0]
    assert int(proposal.tokens[0, 0]) == int(np.argmax(made.rollout(0, [])))
