"""The sampling table and the history: what is written where."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.sampling import (
    SamplingTable,
    admit_history,
    count_emitted,
    empty_history,
    empty_table,
    settings_row,
    write_row,
)
from jspec.settings import Settings


def row_of(settings: Settings, stop_ids=(), seed=0):
    return settings_row(settings, stop_ids, seed, 6, 3)


def test_row_carries_every_setting():
    settings = Settings(
        temperature=0.5,
        top_k=4,
        top_p=0.75,
        min_p=0.25,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.25,
        logit_bias={1: 2.0, 3: -np.inf},
        allowed_token_ids=(1, 3, 5),
        seed=9,
        min_tokens=2,
        log_probs=3,
        prompt_log_probs=True,
    )
    table = write_row(empty_table(3, 6, 3), jnp.int32(1), row_of(settings, (5, 2), seed=9))
    expected = {
        "temperature": [0, 0.5, 0],
        "top_k": [0, 4, 0],
        "top_p": [1, 0.75, 1],
        "min_p": [0, 0.25, 0],
        "repetition": [1, 1.5, 1],
        "presence": [0, 0.5, 0],
        "frequency": [0, -0.25, 0],
        "bias": [[0] * 6, [-np.inf, 2, -np.inf, -np.inf, -np.inf, 0], [0] * 6],
        "biased": [False, True, False],
        "seeds": [0, 9, 0],
        "seeded": [False, True, False],
        "stop_ids": [[-1] * 3, [5, 2, -1], [-1] * 3],
        "min_lengths": [0, 2, 0],
        "log_probs": [-1, 3, -1],
        "prompt_log_probs": [False, True, False],
    }
    assert set(expected) == {field.name for field in dataclasses.fields(SamplingTable)}
    for name, value in expected.items():
        np.testing.assert_array_equal(getattr(table, name), value, err_msg=name)


def test_next_request_of_a_slot_inherits_nothing():
    full = Settings(
        temperature=1.0, top_k=2, logit_bias={0: 1.0}, seed=1, min_tokens=4, log_probs=1, min_p=0.5
    )
    table = write_row(empty_table(2, 6, 3), jnp.int32(0), row_of(full, (1, 2, 3)))
    table = write_row(table, jnp.int32(0), row_of(Settings()))
    for field in dataclasses.fields(SamplingTable):
        np.testing.assert_array_equal(
            getattr(table, field.name), getattr(empty_table(2, 6, 3), field.name), field.name
        )


def test_unseeded_request_gets_the_fresh_seed_and_is_not_coupled():
    row = row_of(Settings(temperature=1.0), seed=2**32 - 1)
    assert (int(row.seeds), bool(row.seeded)) == (2**32 - 1, False)
    assert bool(row_of(Settings(seed=0)).seeded)


def test_too_many_stop_ids_are_refused():
    with pytest.raises(ValueError, match=r"^stop_token_ids: expected at most 3 stop ids.*, got 4; use fewer"):
        row_of(Settings(), (1, 2, 3, 4))


def test_history_counts_what_was_emitted_and_nothing_else():
    history = admit_history(
        empty_history(2, 6), jnp.int32(1), jnp.asarray([4, 0, 4, 2, 2]), jnp.int32(3), jnp.int32(3)
    )
    np.testing.assert_array_equal(history.prompt_seen, [[0] * 6, [1, 0, 0, 0, 1, 0]])
    counted = jax.jit(count_emitted, donate_argnums=0)(
        history,
        jnp.asarray([1, -1, 0]),
        jnp.asarray([[5, 5, 3, 1], [2, 2, 2, 2], [0, -1, -1, -1]]),
        jnp.asarray([3, 4, 0]),
    )
    np.testing.assert_array_equal(counted.output_counts, [[0] * 6, [0, 0, 0, 1, 0, 2]])
    np.testing.assert_array_equal(counted.prompt_seen, [[0] * 6, [1, 0, 0, 0, 1, 0]])


def test_request_that_comes_back_has_emitted_what_is_behind_its_prompt():
    tokens = jnp.asarray([4, 0, 4, 2, 2, 1])
    history = admit_history(empty_history(2, 6), jnp.int32(1), tokens, jnp.int32(5), jnp.int32(2))
    np.testing.assert_array_equal(history.prompt_seen, [[0] * 6, [1, 0, 0, 0, 1, 0]])
    np.testing.assert_array_equal(history.output_counts, [[0] * 6, [0, 0, 2, 0, 1, 0]])


def test_admission_forgets_the_slots_last_request():
    history = admit_history(
        empty_history(2, 6), jnp.int32(0), jnp.asarray([1, 2]), jnp.int32(2), jnp.int32(2)
    )
    history = count_emitted(history, jnp.asarray([0]), jnp.asarray([[3, 3]]), jnp.asarray([2]))
    history = admit_history(history, jnp.int32(0), jnp.asarray([5, 0]), jnp.int32(1), jnp.int32(1))
    np.testing.assert_array_equal(history.output_counts, np.zeros((2, 6)))
    np.testing.assert_array_equal(history.prompt_seen, [[0, 0, 0, 0, 0, 1], [0] * 6])


def test_token_that_is_none_is_not_counted():
    history = count_emitted(
        empty_history(1, 6), jnp.asarray([0]), jnp.asarray([[-1, 6, 2]]), jnp.asarray([3])
    )
    np.testing.assert_array_equal(history.output_counts, [[0, 0, 1, 0, 0, 0]])
