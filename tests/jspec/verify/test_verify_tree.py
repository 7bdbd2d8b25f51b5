"""Trees of random shape: the walk against one in Python, and the law of what is emitted, by enumeration."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law import ANCHOR, P, V, complete, rows_after, target_law

from jspec.coins import Coins, coupled_noise, draw_coins
from jspec.round import OneHot, Proposal, Sparse
from jspec.sampling import empty_table
from jspec.target_rows import TargetRows
from jspec.verify.batch import verify
from jspec.verify.tree import sample_tree

DRAFTS = 6
LEVELS = 3
fast = {"xla_backend_optimization_level": 0}
verify_trees = jax.jit(verify, static_argnames="block_verification", compiler_options=fast)
sample = jax.jit(sample_tree, compiler_options=fast)


def random_tree(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Tokens and parents of at most LEVELS levels; siblings may repeat a token, as nothing forbids it."""
    parents, depths = [], [0]
    while len(parents) < DRAFTS:
        parent = int(rng.integers(0, len(parents) + 1))
        if depths[parent] < LEVELS:
            parents.append(parent)
            depths.append(depths[parent] + 1)
    return rng.integers(0, V, DRAFTS).tolist(), parents


def proposal_of(tokens, parents, lanes: int = 1, length: int = DRAFTS) -> Proposal:
    return Proposal(
        tokens=jnp.broadcast_to(jnp.asarray(tokens, jnp.int32), (lanes, DRAFTS)),
        lengths=jnp.full((lanes,), length, jnp.int32),
        q=OneHot(),
        parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (lanes, DRAFTS)),
        tree_depth=LEVELS,
    )


def rows_of_tree(tokens, lanes: int = 1) -> TargetRows:
    """The table's row after every node; all lanes share them."""
    rows = rows_after(np.asarray([tokens]))
    return dataclasses.replace(rows, starts=jnp.zeros((lanes,), jnp.int32))


def walk(tokens, parents, verified: int, choose) -> tuple[list[int], int]:
    """Nodes visited and the choice at the last one; `choose(node, depth)`."""
    path = [0]
    while True:
        choice = choose(path[-1], len(path) - 1)
        children = [j for j in range(verified) if parents[j] == path[-1] and tokens[j] == choice]
        if not children:
            return path, choice
        path.append(children[0] + 1)


@pytest.mark.parametrize("seed", range(12))
def test_greedy_and_coupled_lanes_follow_the_targets_choice(seed):
    rng = np.random.default_rng(seed)
    tokens, parents = random_tree(rng)
    if seed % 2:  # often right, so that walks go deep
        tokens = [0] * DRAFTS
        for j in range(DRAFTS):
            last = ANCHOR if parents[j] == 0 else tokens[parents[j] - 1]
            tokens[j] = int(P[last].argmax()) if rng.random() < 0.8 else int(rng.integers(V))
    lanes = 2 * (DRAFTS + 1)
    verified = np.arange(lanes) % (DRAFTS + 1)
    coupled = np.arange(lanes) > DRAFTS
    table = empty_table(lanes, V, 1)
    table = dataclasses.replace(
        table,
        temperature=jnp.asarray(coupled, jnp.float32),
        seeded=jnp.asarray(coupled),
        seeds=jnp.full((lanes,), seed, jnp.uint32),
    )
    text_lengths = jnp.full((lanes,), 9, jnp.int32)
    verdict = verify_trees(
        proposal_of(tokens, parents, lanes),
        rows_of_tree(tokens, lanes),
        jnp.asarray(verified, jnp.int32),
        draw_coins(table.seeds, text_lengths, DRAFTS),
        table,
        jnp.arange(lanes, dtype=jnp.int32),
        text_lengths,
    )
    noise = np.asarray(coupled_noise(jnp.full((4,), seed, jnp.uint32), 9 + jnp.arange(4), V))
    with np.errstate(divide="ignore"):
        scores = np.log(P[[ANCHOR, *tokens]]).astype(np.float32)
    for lane in range(lanes):

        def choose(node, depth, lane=lane):
            return int(np.argmax(scores[node] + noise[depth] if coupled[lane] else scores[node]))

        path, bonus = walk(tokens, parents, verified[lane], choose)
        assert verdict.path[lane].tolist() == path + [-1] * (LEVELS + 1 - len(path))
        assert (int(verdict.accept_length[lane]), int(verdict.bonus[lane])) == (len(path) - 1, bonus)


GRID, FINAL = 16, 5040


@pytest.mark.parametrize("seed", range(10))
def test_sampled_law_is_the_targets_at_every_cut(seed):
    """Every coin of three levels on a grid on which P is exact, then the final coin behind each outcome.

    5040 divides by what may be left of P in sixteenths but for 11 and 13, hence the tolerance.
    """
    tokens, parents = random_tree(np.random.default_rng(seed))
    depths = [0]
    for parent in parents:
        depths.append(depths[parent] + 1)
    levels = np.stack(np.meshgrid(*[(np.arange(GRID) + 0.5) / GRID] * LEVELS, indexing="ij"), -1)
    levels = levels.reshape(-1, LEVELS)
    # A node's coin is its level's: only one node of a level is visited.
    of_nodes = levels[:, np.minimum(depths, LEVELS - 1)][:, :DRAFTS]
    final = jnp.asarray((np.arange(FINAL) + 0.5) / FINAL, jnp.float32)
    for verified in range(DRAFTS + 1):

        def outcome(coins, final, verified=verified):
            lanes = len(final)
            return sample(
                proposal_of(tokens, parents, lanes),
                rows_of_tree(tokens, lanes),
                jnp.full((lanes,), verified, jnp.int32),
                Coins(accept=jnp.asarray(coins, jnp.float32), bonus=final),
            )

        paths = np.asarray(outcome(of_nodes, jnp.full((len(levels),), 0.5)).path)
        kinds, first, counts = np.unique(paths, axis=0, return_index=True, return_counts=True)
        law = np.zeros((V, V, V))
        for path, lane, count in zip(kinds, first, counts, strict=True):
            ends = outcome(np.broadcast_to(of_nodes[lane], (FINAL, DRAFTS)), final)
            np.testing.assert_array_equal(ends.path, np.broadcast_to(path, ends.path.shape))
            accepted = [tokens[node - 1] for node in path[1:] if node > 0]
            assert max(path) <= verified
            block = np.broadcast_to([*accepted, *[0] * (LEVELS - len(accepted))], (FINAL, LEVELS))
            weights = np.full((FINAL,), count / len(levels) / FINAL)
            law += complete(block, np.asarray(ends.accept_length), np.asarray(ends.bonus), weights)
        np.testing.assert_allclose(law, target_law(), atol=2e-4)


def test_repeated_sibling_takes_no_mass_of_its_own():
    # Token 3 has 3/16 after the anchor; twice among the children it would be taken with 6/16.
    tokens, parents = [3, 3, 1, 1, 1, 1], [0, 0, 0, 0, 1, 2]
    coins = (np.arange(16) + 0.5) / 16
    verdict = sample(
        proposal_of(tokens, parents, 16),
        rows_of_tree(tokens, 16),
        jnp.full((16,), 4, jnp.int32),
        Coins(
            accept=jnp.broadcast_to(jnp.asarray(coins, jnp.float32)[:, None], (16, DRAFTS)),
            bonus=jnp.zeros((16,)),
        ),
    )
    assert verdict.path[:, 1].tolist() == [1] * 3 + [3] * 6 + [-1] * 7
    # What is left has neither 3 nor 1: the first of it is 0.
    assert verdict.bonus[9:].tolist() == [0] * 7


def test_row_that_is_no_distribution_fails_its_lane_only():
    tokens, parents = [1, 0, 2, 4, 5, 6], [0, 0, 1, 1, 2, 3]
    rows = rows_of_tree(tokens, 2)
    logits = jnp.concatenate([rows.logits, rows.logits.at[0].set(jnp.nan)])
    rows = TargetRows(
        logits=logits,
        log_normaliser=jnp.zeros((14,)),
        floor=jnp.full((14,), -jnp.inf),
        starts=jnp.asarray([0, 7], jnp.int32),
    )
    coins = Coins(accept=jnp.full((2, DRAFTS), 0.3, jnp.float32), bonus=jnp.full((2,), 0.5, jnp.float32))
    verdict = sample(proposal_of(tokens, parents, 2), rows, jnp.full((2,), DRAFTS, jnp.int32), coins)
    assert int(verdict.bonus[1]) == -1
    assert int(verdict.bonus[0]) >= 0


def test_what_lies_past_the_length_is_never_walked_to():
    tokens, parents = [1, 1, 1, 1, 1, 1], [0, 1, 99, -5, 2, 3]
    zeros = jnp.zeros((1,), jnp.int32)
    verdict = verify_trees(
        proposal_of(tokens, parents, 1, length=2),
        rows_of_tree(tokens),
        jnp.asarray([DRAFTS], jnp.int32),
        draw_coins(jnp.zeros((1,), jnp.uint32), zeros, DRAFTS),
        empty_table(1, V, 1),
        zeros,
        zeros,
    )
    assert verdict.path.tolist() == [[0, 1, 2, -1]]  # 1 is the best after the anchor and after itself
    assert int(verdict.bonus[0]) == 1


def test_rules_that_trees_do_not_have_are_refused():
    tokens, parents = [1] * DRAFTS, [0] * DRAFTS
    proposal = proposal_of(tokens, parents)
    zeros, coins = (
        jnp.zeros((1,), jnp.int32),
        draw_coins(jnp.zeros((1,), jnp.uint32), jnp.zeros((1,), jnp.int32), DRAFTS),
    )
    rest = (rows_of_tree(tokens), zeros, coins, empty_table(1, V, 1), zeros, zeros)
    with pytest.raises(ValueError, match="block_verification: expected False for a tree, got True"):
        verify(proposal, *rest, block_verification=True)
    drawn = dataclasses.replace(
        proposal, q=Sparse(ids=jnp.zeros((1, DRAFTS, 1), jnp.int32), probs=jnp.ones((1, DRAFTS, 1)))
    )
    with pytest.raises(ValueError, match=r"proposal.q: expected OneHot for a tree, got Sparse"):
        verify(drawn, *rest)
