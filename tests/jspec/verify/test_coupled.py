"""Coupled verification: a seed fixes the text, whatever drafts, batch and cuts are."""

import jax
import jax.numpy as jnp
import numpy as np
from law import ANCHOR, P, V, assert_follows, rows_after

from jspec.coins import coupled_noise
from jspec.target_rows import TargetRows
from jspec.verify.coupled import coupled_choices

choices_of = jax.jit(coupled_choices, static_argnames="nodes")


def plain_text(seed: int, start: int, count: int) -> list[int]:
    """Decoding one token at a time with that seed."""
    text = [ANCHOR]
    for position in range(start, start + count):
        rows = rows_after(np.asarray([[text[-1]]]))
        last = TargetRows(  # the row after text[-1]
            logits=rows.logits[1:],
            log_normaliser=rows.log_normaliser[1:],
            floor=rows.floor[1:],
            starts=jnp.asarray([0]),
        )
        chosen = choices_of(last, jnp.asarray([seed], jnp.uint32), jnp.asarray([position]), nodes=1)
        text.append(int(chosen[0, 0]))
    return text[1:]


def test_chain_rows_choose_what_plain_decoding_would():
    for seed, start in [(1, 10), (2, 10), (1, 11), (2**32 - 1, 3)]:
        plain = plain_text(seed, start, 4)
        # Lanes of other seeds and lengths around it must not matter.
        paths = np.asarray([[1, 1, 1], plain[:3], [6, 6, 6]])
        chosen = choices_of(
            rows_after(paths), jnp.asarray([7, seed, 9], jnp.uint32), jnp.asarray([100, start, 0]), nodes=4
        )
        np.testing.assert_array_equal(chosen[1], plain)


def many_rows(count: int, floor: float) -> TargetRows:
    """The row after the anchor at `count` consecutive positions of one lane."""
    row = rows_after(np.zeros((1, 0), int))
    return TargetRows(
        logits=jnp.broadcast_to(row.logits[0], (count, V)),
        log_normaliser=jnp.zeros((count,)),
        floor=jnp.full((count,), floor),
        starts=jnp.asarray([0]),
    )


def test_choice_follows_the_targets_law():
    for seed in (0, 1):
        chosen = choices_of(
            many_rows(40_000, -np.inf), jnp.asarray([seed], jnp.uint32), jnp.asarray([3]), nodes=40_000
        )
        assert_follows(np.bincount(np.asarray(chosen)[0], minlength=V), P[ANCHOR])


def test_tokens_below_the_floor_are_never_chosen():
    rows = many_rows(500, float(np.log(4 / 16)) - 1e-6)
    chosen = choices_of(rows, jnp.asarray([5], jnp.uint32), jnp.asarray([0]), nodes=500)
    assert set(np.unique(chosen)) == {0, 1}


def test_drafter_with_the_same_noise_is_accepted_far_more_often_than_by_chance():
    seeds, positions = jnp.arange(4000, dtype=jnp.uint32), jnp.full((4000,), 8, jnp.int32)
    noise = np.asarray(coupled_noise(seeds, positions, V))
    with np.errstate(divide="ignore"):
        drafted = np.argmax(np.log(P[6]) + noise, axis=1)
        wanted = np.argmax(np.log(P[2]) + noise, axis=1)
    by_chance = float(P[6] @ P[2])
    assert np.mean(drafted == wanted) > by_chance + 0.2
