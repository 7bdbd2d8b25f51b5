"""The allotment against its order written out, in plain XLA and by the TPU kernel in interpret mode."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.survival import reference, tpu
from pallas_kernels.survival.api import allot

LANES, DRAFTS = 5, 6
PROGRAMS = {
    "xla": jax.jit(reference.allot),
    "tpu": jax.jit(functools.partial(tpu.allot, interpret=pltpu.InterpretParams())),
}


def by_hand(survival, lengths, slots, budget, least, most, epsilon) -> list[int]:
    entries = []
    for lane, row in enumerate(survival):
        lowest = np.float32(np.inf)
        for position in range(min(lengths[lane], most + 1)):
            lowest = min(lowest, row[position])
            if lowest >= np.float32(epsilon):
                entries.append((-lowest, position, slots[lane], lane))
    taken = [lane for *_, lane in sorted(entries)[:budget]]
    return [min(least + taken.count(lane), most, lengths[lane]) for lane in range(len(slots))]


@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]), min_size=LANES * DRAFTS, max_size=LANES * DRAFTS
    ),
    st.lists(st.integers(0, DRAFTS), min_size=LANES, max_size=LANES),
    st.permutations(range(0, 3 * LANES, 3)),
    st.integers(0, LANES * DRAFTS + 2),
    st.integers(0, 2),
    st.integers(2, DRAFTS),
    st.sampled_from([0.0, 1e-6, 0.25]),
)
def test_the_first_of_the_order_are_taken(values, lengths, slots, budget, least, most, epsilon):
    survival = np.array(values, np.float32).reshape(LANES, DRAFTS)
    slots = [slot if length else -1 for slot, length in zip(slots, lengths, strict=True)]
    expected = by_hand(survival, lengths, slots, budget, least, most, epsilon)
    survival[np.arange(DRAFTS)[None] >= np.array(lengths)[:, None]] = np.nan
    arguments = (
        jnp.asarray(survival),
        *(jnp.asarray(v, jnp.int32) for v in (lengths, slots, budget, least, most)),
        jnp.float32(epsilon),
    )
    for name, program in PROGRAMS.items():
        np.testing.assert_array_equal(program(*arguments), expected, err_msg=name)


def test_an_implementation_that_cannot_be_had_is_refused():
    ints = jnp.zeros((2,), jnp.int32)
    with pytest.raises(ValueError, match="implementation: expected None"):
        allot(jnp.zeros((2, 3)), ints, ints, 1, 0, 3, 0.0, implementation="gpu")
    with pytest.raises(ValueError, match="interpret mode"):
        allot(jnp.zeros((2, 3)), ints, ints, 1, 0, 3, 0.0, implementation="tpu")
