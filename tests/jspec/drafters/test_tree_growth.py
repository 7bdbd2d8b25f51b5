"""Growing trees: closed under ancestors with every tie, right visibility, static equal to its paths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.drafters.tree import Frontier, Ranked, frontier_sight, grow
from jspec.drafters.tree_shape import chain_shape, dynamic_tree, static_tree

LANES = 2


def bits(words) -> list[int]:
    return np.flatnonzero(np.unpackbits(np.asarray(words, "<i4").view(np.uint8), bitorder="little")).tolist()


def numbered(shape, probs_of, lanes=LANES):
    """Grows with tokens that number the candidates in the order of generation; returns what was asked, too."""
    asked: list[Frontier] = []

    def ranked(rows, start, depth):
        ids = start + jnp.arange(rows * shape.width, dtype=jnp.int32).reshape(rows, shape.width)
        return Ranked(
            ids=jnp.broadcast_to(ids, (lanes, rows, shape.width)), probs=probs_of(depth, rows, shape.width)
        )

    def extend(start, frontier):
        asked.append(frontier)
        rows = frontier.tokens.shape[1]
        return start + rows * shape.width, ranked(rows, start, frontier.depth)

    proposal, _ = grow(shape, ranked(1, 0, 0), extend, shape.width)
    return proposal, asked


SHAPE = dynamic_tree(width=3, depth=4, draft_length=9)


@jax.jit
def grown(probs):
    """probs: [depth, lanes, rows, width] with rows for the widest depth."""
    return numbered(SHAPE, lambda depth, rows, width: probs[depth, :, :rows])[0]


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.5, 1.0, 1.5, -1.0, float("nan")]), min_size=72, max_size=72)
)
def test_every_count_prefix_is_closed_under_ancestors_whatever_the_ties(values):
    probs = np.asarray(values, np.float32).reshape(4, LANES, 3, 3)
    proposal = grown(probs)
    for lane in range(LANES):
        tokens, parents = np.asarray(proposal.tokens)[lane], np.asarray(proposal.parents)[lane]
        assert (np.diff(tokens) > 0).all()  # in the order of generation
        assert (parents >= 0).all() and (parents <= np.arange(9)).all()
        depth = np.zeros(10, int)
        for draft, parent in enumerate(parents):
            depth[draft + 1] = depth[parent] + 1
            # A child of the anchor is one of the first three candidates; then layers of nine.
            assert depth[draft + 1] == (1 if tokens[draft] < 3 else 2 + (tokens[draft] - 3) // 9)
        assert (np.diff(depth) >= 0).all()


def reference(probs, width, depth, count):
    """EAGLE-2 in plain Python: [(token, path)] kept, in the order of generation."""
    layer, everything, token = [((), 1.0, None)], [], 0
    for level in range(depth):
        candidates = []
        for row, (path, score, _) in enumerate(layer):
            for rank in range(width):
                p = np.float32(score) * np.float32(probs[level][row][rank])
                candidates.append(((*path, token), p, token))
                token += 1
        everything += candidates
        order = sorted(range(len(candidates)), key=lambda i: (-candidates[i][1], i))
        layer = [candidates[i] for i in (order[:width] if level else range(width))]
    best = sorted(range(len(everything)), key=lambda i: (-everything[i][1], i))[:count]
    return [everything[i] for i in sorted(best)]


@pytest.mark.parametrize("seed", range(4))
def test_kept_are_the_best_of_all_that_was_generated(seed):
    probs = np.random.default_rng(seed).dirichlet(np.ones(5), size=(4, LANES, 3))[..., :3].astype(np.float32)
    probs = -np.sort(-probs, axis=-1)
    proposal = grown(probs)
    for lane in range(LANES):
        expected = reference(probs[:, lane], 3, 4, 9)
        tokens, parents = proposal.tokens[lane].tolist(), proposal.parents[lane].tolist()
        assert tokens == [token for _, _, token in expected]
        for draft, (path, _, _) in enumerate(expected):
            above = -1 if len(path) == 1 else path[-2]
            assert (tokens[parents[draft] - 1] if parents[draft] else -1) == above


def test_frontier_says_whose_state_to_continue_and_who_is_seen():
    probs = np.random.default_rng(3).random((3, LANES, 3, 3)).astype(np.float32)
    shape = dynamic_tree(width=3, depth=4, draft_length=5)
    _, asked = numbered(shape, lambda depth, rows, width: jnp.asarray(probs[depth % 3, :, :rows]))
    assert [f.depth for f in asked] == [1, 2, 3]
    assert asked[-1].starts == (0, 3, 6)
    for lane in range(LANES):
        seen: list[list[int]] = []
        for frontier, start in zip(asked, (0, 3, 6), strict=True):
            before = seen[-3:]
            for row in range(3):
                source = int(frontier.sources[lane, row])
                above = before[source] if start else []
                assert bits(frontier.visible[lane, row]) == [*above, start + row]
                # Tokens are numbered by generation: row s of a frontier gives the three from 3 s on.
                if start:
                    first = 3 + 9 * (start // 3 - 1)
                    assert (int(frontier.tokens[lane, row]) - first) // 3 == source
                seen.append(bits(frontier.visible[lane, row]))


def test_frontier_rows_may_need_several_words():
    shape = dynamic_tree(width=10, depth=5, draft_length=40)
    _, asked = numbered(shape, lambda depth, rows, width: jnp.full((LANES, rows, width), 0.1))
    assert asked[-1].visible.shape == (LANES, 10, 2)
    for row in range(10):
        assert bits(asked[-1].visible[0, row])[-1] == 30 + row
        assert len(bits(asked[-1].visible[0, row])) == 4


PATHS = [[0], [1], [2], [0, 0], [0, 2], [2, 1], [0, 2, 0], [0, 2, 1], [2, 1, 0], [0, 2, 1, 0]]


def test_static_tree_takes_the_ranks_of_its_paths():
    shape = static_tree(PATHS)

    def extend(_, frontier):
        # The token spells its path: a digit per rank, plus one.
        return None, spelled(frontier.tokens)

    def spelled(tokens):
        ids = tokens[:, :, None] * 10 + jnp.arange(1, 4, dtype=jnp.int32)[None, None]
        return Ranked(ids=ids, probs=jnp.full(ids.shape, 0.3))

    proposal, _ = grow(shape, spelled(jnp.zeros((LANES, 1), jnp.int32)), extend, None)
    names = [int("".join(str(rank + 1) for rank in path)) for path in shape.paths]
    for lane in range(LANES):
        assert proposal.tokens[lane].tolist() == names
        parents = proposal.parents[lane].tolist()
        assert [names[p - 1] if p else 0 for p in parents] == [name // 10 for name in names]
    assert proposal.depth == 4


@pytest.mark.parametrize("shape", [chain_shape(3), static_tree([[0], [0, 0], [0, 0, 0]])])
def test_chain_has_no_parents(shape):
    proposal, asked = numbered(shape, lambda depth, rows, width: jnp.full((LANES, rows, width), 0.5))
    assert proposal.parents is None
    assert proposal.depth == 3
    assert proposal.tokens.tolist() == [[0, 1, 2]] * LANES
    assert [f.sources.tolist() for f in asked] == [[[0]] * LANES] * 2


def test_window_hides_rows_in_flight_too():
    shape = dynamic_tree(width=2, depth=5, draft_length=6)
    _, asked = numbered(shape, lambda depth, rows, width: jnp.full((LANES, rows, width), 0.5))
    table, lengths = jnp.zeros((LANES, 1), jnp.int32), jnp.asarray([5, 9], jnp.int32)
    last = asked[-1]  # depth 4: rows 6 and 7, positions context_lengths + 3
    whole = frontier_sight(last, table, lengths)
    assert [len(bits(row)) for row in whole.visible] == [4] * 4
    assert whole.key_offsets.tolist() == [0, 8, 16]
    narrow = frontier_sight(last, table, lengths, window=2)
    assert [bits(row)[0] >= 4 and len(bits(row)) == 2 for row in narrow.visible] == [True] * 4
    assert narrow.first_visible.tolist() == [7, 7, 11, 11]


def test_candidates_that_do_not_fit_the_shape_are_refused():
    shape = dynamic_tree(width=3, depth=2, draft_length=4)
    two = Ranked(ids=jnp.zeros((1, 1, 2), jnp.int32), probs=jnp.ones((1, 1, 2)))
    with pytest.raises(ValueError, match=r"candidates: expected at least 3 of each row .*, got 2"):
        grow(shape, two, lambda state, frontier: (state, two), None)
    three = Ranked(ids=jnp.zeros((1, 1, 3), jnp.int32), probs=jnp.ones((1, 1, 3)))
    with pytest.raises(
        ValueError, match="candidates: expected 3 rows, one for each that was asked for, got 1"
    ):
        grow(shape, three, lambda state, frontier: (state, three), None)


def test_deep_paths_of_unlikely_tokens_are_still_told_apart():
    """Twelve tokens of about 1e-4 each: the product would be 1e-48, which is 0 in float32."""
    shape = dynamic_tree(width=2, depth=12, draft_length=24, beam=1)
    better = Ranked(ids=jnp.array([[[1, 2]]]), probs=jnp.array([[[1e-4, 2e-4]]], jnp.float32))
    proposal, _ = grow(shape, better, lambda state, frontier: (state, better), None)
    # At every depth the second candidate is the more probable one, and is the one that is expanded.
    assert proposal.parents is not None
    tokens, parents = proposal.tokens[0].tolist(), proposal.parents[0].tolist()
    expanded = [tokens[parent - 1] for parent in parents if parent]
    assert set(expanded) == {2} and len(expanded) == 22
