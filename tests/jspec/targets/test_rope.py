"""Rotary frequencies of every scaling rule."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.targets.rope import (
    Divisors,
    Linear,
    Llama3,
    Rope,
    Yarn,
    inverse_frequencies,
    rotate,
    rotation,
    yarn_attention_factor,
)

LLAMA3 = Llama3(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_context=64)


def test_plain_frequencies_fall_geometrically():
    np.testing.assert_allclose(inverse_frequencies(Rope(theta=10_000.0), 8), [1, 0.1, 0.01, 0.001], rtol=1e-6)


def test_linear_divides_all():
    rope = Rope(theta=10_000.0, scaling=Linear(factor=4.0))
    np.testing.assert_allclose(inverse_frequencies(rope, 4), [0.25, 0.0025], rtol=1e-6)


def test_llama3_keeps_short_waves_divides_long_ones_and_blends_between():
    plain = inverse_frequencies(Rope(theta=10_000.0), 8)
    scaled = inverse_frequencies(Rope(theta=10_000.0, scaling=LLAMA3), 8)

    # Turns over 64 positions: 10.2, 1.02, 0.1, 0.01. The first is above 4, the last two below 1.
    keep = (64 * 0.1 / (2 * np.pi) - 1) / 3
    np.testing.assert_allclose(scaled / plain, [1, (1 - keep) / 8 + keep, 1 / 8, 1 / 8], rtol=1e-5)


def test_yarn_ramps_from_kept_to_divided():
    yarn = Yarn(factor=4.0, original_context=64, attention_factor=1.0, beta_fast=8.0, beta_slow=1.0)
    plain = inverse_frequencies(Rope(theta=100.0), 16)
    scaled = inverse_frequencies(Rope(theta=100.0, scaling=yarn), 16)

    # The ramp begins at floor(0.42) = 0 and ends at ceil(4.03) = 5 of the 8 frequencies.
    ramp = np.clip(np.arange(8) / 5, 0, 1)
    np.testing.assert_allclose(scaled / plain, ramp / 4 + 1 - ramp, rtol=1e-5)


def test_yarn_attention_factor_multiplies_cos_and_sin():
    assert yarn_attention_factor(4.0) == pytest.approx(1.138629)
    assert yarn_attention_factor(0.5) == 1.0
    assert yarn_attention_factor(40.0, mscale=0.707, mscale_all_dim=1.0) == pytest.approx(0.921042, rel=1e-4)
    yarn = Yarn(factor=4.0, original_context=64, attention_factor=1.5)
    cos, sin = rotation(Rope(theta=100.0, scaling=yarn), 8, jnp.array([0, 3]))
    np.testing.assert_allclose(cos**2 + sin**2, np.full((2, 4), 2.25), rtol=1e-6)


def test_stored_divisors_equal_the_rule_they_were_made_from():
    rule = Rope(theta=10_000.0, scaling=LLAMA3)
    divisors = inverse_frequencies(Rope(theta=10_000.0), 8) / inverse_frequencies(rule, 8)
    stored = Rope(theta=10_000.0, scaling=Divisors(values=tuple(divisors.tolist())))

    np.testing.assert_allclose(inverse_frequencies(stored, 8), inverse_frequencies(rule, 8), rtol=1e-6)
    with pytest.raises(ValueError, match="rope: expected 8 frequency divisors, got 4"):
        inverse_frequencies(stored, 16)


def test_rotation_turns_dimension_i_with_its_half_partner():
    x = jnp.array([[[1.0, 0.0, 0.0, 0.0]], [[0.0, 1.0, 0.0, 0.0]]])  # two nodes, one head of 4
    cos, sin = rotation(Rope(theta=10_000.0), 4, jnp.array([2, 100]))

    turned = rotate(x, cos, sin)

    expected = [[[np.cos(2), 0, np.sin(2), 0]], [[0, np.cos(1), 0, np.sin(1)]]]
    np.testing.assert_allclose(turned, expected, atol=1e-6)


def test_scores_depend_on_distance_only():
    rope = Rope(theta=10_000.0)
    q, k = (jnp.linspace(-1.0, 1.0, 8).reshape(1, 1, 8) * s for s in (1.0, 0.7))

    def score(at: int, other: int) -> float:
        a = rotate(q, *rotation(rope, 8, jnp.array([at])))
        b = rotate(k, *rotation(rope, 8, jnp.array([other])))
        return float(jnp.sum(a * b))

    assert score(9, 4) == pytest.approx(score(105, 100), abs=1e-5)
