"""The convolution of DFlash 2 on numbers that can be followed by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.dflash2_layers import Convolution, GroupedConvolution, convolve


def test_rows_are_mixed_with_earlier_rows_of_their_own_block():
    x = jnp.asarray([[1.0, 2.0], [10.0, 20.0], [3.0, 4.0], [30.0, 40.0]])  # two blocks of two rows
    base = jnp.asarray([[1.0, 2.0], [0.5, 0.25]])
    still = jnp.zeros((4, 2, 1))
    expected = [[1, 4], [10.5, 40.5], [3, 8], [31.5, 81]]
    np.testing.assert_array_equal(convolve(x, base, still, 2), expected)


def test_additions_are_shared_by_a_group_and_belong_to_a_row():
    x = jnp.asarray([[1.0, 1.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]])
    base = jnp.zeros((2, 4)).at[0].set(1.0)
    added = jnp.zeros((2, 2, 2)).at[1, 1].set(jnp.asarray([3.0, 5.0]))  # row 1, tap 1
    np.testing.assert_array_equal(convolve(x, base, added, 2), [[1, 1, 1, 1], [5, 5, 7, 7]])


def test_both_sides_read_their_kernels_from_what_the_sublayer_reads():
    conv = GroupedConvolution(2, 2, Convolution(taps=1, group_size=2), jnp.dtype(jnp.float32))
    conv.kernel_projection[...] = jnp.asarray([[1.0, 10.0], [0.0, 0.0]])  # per side, from feature 0
    x = jnp.asarray([[1.0, 7.0], [2.0, 7.0]])
    prepared, added = conv.prepare(x)
    np.testing.assert_array_equal(prepared, [[1, 7], [4, 14]])
    np.testing.assert_array_equal(conv.finish(jnp.ones((2, 2)), added), [[10, 10], [20, 20]])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_identity_returns_its_input_bit_for_bit(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(6, 8)), dtype)
    base = jnp.zeros((3, 8)).at[0].set(1.0)
    out = convolve(x, base, jnp.zeros((6, 3, 4)), 3)
    assert out.dtype == dtype
    np.testing.assert_array_equal(out, x)


def test_one_blocks_nan_stays_in_its_block():
    x = jnp.asarray([[jnp.nan], [1.0], [2.0], [3.0]])
    out = np.asarray(convolve(x, jnp.asarray([[1.0], [1.0]]), jnp.zeros((4, 2, 1)), 2))
    assert np.isnan(out[:2]).all()
    np.testing.assert_array_equal(out[2:], [[2], [5]])
