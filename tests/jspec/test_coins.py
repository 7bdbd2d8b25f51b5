"""Coins: functions of the request and the round, never of the batch."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.coins import Purpose, coupled_noise, draw_coins, uniforms


def seeds(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.uint32)


def lengths(*values: int) -> jax.Array:
    return jnp.asarray(values, jnp.int32)


def test_coins_follow_the_request_not_the_lane_or_the_width():
    together = draw_coins(seeds(1, 2, 3, 2**32 - 1), lengths(10, 20, 30, 40), 5)
    for lane, (seed, length) in enumerate([(1, 10), (2, 20), (3, 30), (2**32 - 1, 40)]):
        alone = draw_coins(seeds(seed), lengths(length), 2)
        np.testing.assert_array_equal(alone.accept[0], together.accept[lane, :2])
        np.testing.assert_array_equal(alone.bonus[0], together.bonus[lane])


def test_coins_differ_by_seed_round_node_and_purpose():
    rounds = lengths(*range(50))
    values = [
        np.asarray(uniforms(jnp.full((50,), seed, jnp.uint32), rounds, 4, purpose)).reshape(-1)
        for seed, purpose in itertools.product((0, 1, 2), (Purpose.ACCEPT, Purpose.BONUS, Purpose.DRAFT))
    ]
    drawn = np.concatenate(values)
    assert len(np.unique(drawn)) > drawn.size - 5  # 24 bits: a few of 1800 may be equal by chance
    coins = draw_coins(seeds(5), lengths(6), 1)
    assert float(coins.accept[0, 0]) != float(coins.bonus[0])


def test_coins_are_uniform_in_the_half_open_interval():
    drawn = np.asarray(uniforms(jnp.arange(2000, dtype=jnp.uint32), jnp.full((2000,), 7), 10, Purpose.ACCEPT))
    assert drawn.min() >= 0 and drawn.max() < 1
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    chi_square = np.sum((counts - 1000) ** 2 / 1000)
    assert chi_square < 43.8  # 19 degrees of freedom, p = 0.001
    assert abs(np.corrcoef(drawn[:, 0], drawn[:, 1])[0, 1]) < 0.07


def test_no_draft_token_needs_no_coin():
    assert draw_coins(seeds(1, 2), lengths(3, 4), 0).accept.shape == (2, 0)


def test_coupled_noise_is_the_same_in_every_batch():
    whole = np.asarray(
        jax.jit(lambda s, p: coupled_noise(s, p, 103))(seeds(7, 8, 7, 9, 7), lengths(0, 0, 5, 5, 6))
    )
    for row, (seed, position) in enumerate([(7, 0), (8, 0), (7, 5), (9, 5), (7, 6)]):
        alone = coupled_noise(seeds(seed), lengths(position), 103)
        np.testing.assert_array_equal(np.asarray(alone)[0], whole[row])
    assert len(np.unique(whole)) == whole.size


def test_coupled_noise_is_gumbel():
    noise = np.sort(
        np.asarray(coupled_noise(jnp.arange(400, dtype=jnp.uint32), jnp.zeros((400,), jnp.int32), 50)).ravel()
    )
    assert np.isfinite(noise).all()
    expected = np.exp(-np.exp(-noise))
    measured = (np.arange(noise.size) + 0.5) / noise.size
    assert np.max(np.abs(expected - measured)) < 1.95 / np.sqrt(noise.size)  # Kolmogorov-Smirnov, p = 0.001
