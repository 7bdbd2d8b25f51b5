"""Block verification: the target's law, at every cut, and more accepted tokens than one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from law import ANCHOR, P, assert_follows, count_blocks, drafted, proposal_of, rows_after, target_law

from jspec.coins import Coins, draw_coins
from jspec.round import Dense, Proposal
from jspec.verify.block import verify_block
from jspec.verify.rejection import reject

LANES = 100_000


def run(rule, kind: str, verify_lengths, lengths=None):
    """Verdicts on drafts of three tokens, drawn by the drafter's tables, with the library's coins."""
    paths, weights = drafted(kind, drafts=3)
    lane = np.random.default_rng(1).choice(len(paths), size=LANES, p=weights)
    rows = rows_after(paths)
    rows = dataclasses.replace(rows, starts=rows.starts[lane])
    proposed = np.full((LANES,), 3) if lengths is None else np.asarray([lengths(p) for p in paths])[lane]
    verified = np.asarray([verify_lengths(path) for path in paths])[lane]
    coins = draw_coins(jnp.arange(LANES, dtype=jnp.uint32), jnp.full((LANES,), 5, jnp.int32), 3)
    proposal = proposal_of(paths[lane], proposed, kind)
    accept_length, bonus = jax.jit(rule)(proposal, rows, jnp.asarray(verified, jnp.int32), coins)
    return paths[lane], np.asarray(accept_length), np.asarray(bonus)


def goes_on(block: np.ndarray) -> np.ndarray:
    return P[block[:, -1] if block.shape[1] else np.full(len(block), ANCHOR)]


@pytest.mark.parametrize("kind", ["one-hot", "dense", "reduced", "sparse"])
def test_law_is_the_targets(kind):
    counts = count_blocks(*run(verify_block, kind, lambda path: 3), goes_on)
    assert_follows(counts, target_law())


@pytest.mark.parametrize("verify_length", [0, 1, 2])
def test_law_is_the_targets_at_every_cut(verify_length):
    paths, accept_length, bonus = run(verify_block, "sparse", lambda path: verify_length)
    assert accept_length.max() == verify_length
    assert_follows(count_blocks(paths, accept_length, bonus, goes_on), target_law())


def test_law_is_the_targets_when_earlier_tokens_end_the_block():
    counts = count_blocks(
        *run(
            verify_block,
            "dense",
            lambda path: 3 if path[0] == 1 else 1,
            lambda path: 3 if path[0] == 1 else 1,
        ),
        goes_on,
    )
    assert_follows(counts, target_law())


def test_chi_square_sees_a_residual_that_forgets_the_scale():
    paths, accept_length, _ = run(verify_block, "dense", lambda path: 3)
    bonus = run(reject, "dense", lambda path: 3)[2]
    with pytest.raises(AssertionError, match=r"chi-square|without probability"):
        assert_follows(count_blocks(paths, accept_length, bonus, goes_on), target_law())


def test_accepts_more_than_one_by_one():
    # The paper's example: p = (1/3, 2/3), q = (2/3, 1/3), two tokens. Jointly 11/9 are accepted, singly 10/9.
    p, q = np.asarray([1, 2]) / 3, np.asarray([2, 1]) / 3
    paths = np.random.default_rng(2).choice(2, size=(LANES, 2), p=q)
    proposal = Proposal(
        tokens=jnp.asarray(paths, jnp.int32),
        lengths=jnp.full((LANES,), 2, jnp.int32),
        q=Dense(probs=jnp.broadcast_to(jnp.asarray(q, jnp.float32), (LANES, 2, 2)), ids=None),
    )
    rows = rows_after(paths, np.stack([p, p]))
    coins = draw_coins(jnp.arange(LANES, dtype=jnp.uint32), jnp.full((LANES,), 5, jnp.int32), 2)
    for rule, expected in [(verify_block, 11 / 9), (reject, 10 / 9)]:
        accept_length, _ = jax.jit(rule)(proposal, rows, proposal.lengths, coins)
        assert abs(float(jnp.mean(accept_length)) - expected) < 0.008


def test_equals_rejection_when_one_token_is_tested():
    for verify_length in (0, 1):
        block = run(verify_block, "sparse", lambda path: verify_length, lambda path: 1)  # noqa: B023
        single = run(reject, "sparse", lambda path: verify_length, lambda path: 1)  # noqa: B023
        for got, expected in zip(block, single, strict=True):
            np.testing.assert_array_equal(got, expected)


def test_placeholders_and_broken_rows():
    paths = np.asarray([[1, 1, 0], [1, 1, 0], [1, 1, 0]])
    lengths = np.asarray([2, 3, 1])
    coins = Coins(accept=jnp.zeros((3, 3)), bonus=jnp.full((3,), 0.5))
    rows = rows_after(paths)
    proposal = proposal_of(paths, lengths, "one-hot")
    accept_length, bonus = jax.jit(verify_block)(proposal, rows, jnp.full((3,), 3), coins)
    np.testing.assert_array_equal(accept_length, [2, 2, 1])
    broken = dataclasses.replace(rows, logits=rows.logits.at[4:8].set(jnp.nan))
    got = jax.jit(verify_block)(proposal, broken, jnp.full((3,), 3), coins)
    np.testing.assert_array_equal(got[0], [2, 0, 1])
    np.testing.assert_array_equal(got[1], [int(bonus[0]), -1, int(bonus[2])])
