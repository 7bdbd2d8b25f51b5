"""Forced accept lengths."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters.protocol import Committed, Text
from jspec.drafters.simulated import Simulated, SimulatedState, simulated
from jspec.target_rows import TargetRows


def rows(lanes: int, nodes: int) -> TargetRows:
    """Row i of the target says id i % 10."""
    logits = jnp.asarray(np.eye(10)[np.arange(lanes * nodes) % 10], jnp.float32)
    flat = jnp.zeros((lanes * nodes,), jnp.float32)
    values = dict(logits=logits, log_normaliser=flat, floor=flat, starts=jnp.arange(lanes) * nodes)
    fields = {field.name for field in dataclasses.fields(TargetRows)}
    return TargetRows(**{name: value for name, value in values.items() if name in fields})


def text(*lengths: int) -> Text:
    tokens = np.tile(np.arange(16, dtype=np.int32), (len(lengths), 1))
    return Text(tokens=jnp.asarray(tokens), lengths=jnp.asarray(lengths, jnp.int32))


def absorb(
    drafter, view, state, lanes, lengths, context_lengths, is_first=False
) -> tuple[SimulatedState, list[int]]:
    committed = Committed(
        features=jnp.zeros((1, 0)),
        positions=jnp.zeros((1,), jnp.int32),
        path=jnp.full((len(lanes), 1), -1, jnp.int32),
        context_lengths=jnp.asarray(context_lengths, jnp.int32),
        is_first=(jnp.asarray(context_lengths, jnp.int32) == 0) | is_first,
    )
    state, ready = drafter.absorb((), view, state, jnp.asarray(lanes), text(*lengths), committed)
    return state, ready.tolist()


def accept(drafter: Simulated, view, greedy, state, lanes, lengths, verify_lengths):
    proposal = drafter.draft((), view, state, jnp.asarray(lanes), text(*lengths), greedy)
    nodes = drafter.draft_length + 1
    return proposal, drafter.verdict(
        state, jnp.asarray(lanes), proposal, rows(len(lanes), nodes), jnp.asarray(verify_lengths)
    )


def test_accepts_the_listed_lengths_round_by_round_and_starts_over(view, greedy):
    drafter = simulated(draft_length=3, accept_lengths=[2, 0, 3])
    state = drafter.init((), view, 3)
    state, ready = absorb(drafter, view, state, [1], [5, 5, 5], [0])  # the prompt
    assert ready == [3]
    length, seen = 5, []
    for _ in range(5):
        proposal, verdict = accept(drafter, view, greedy, state, [1], [0, length, 0], [3])
        assert proposal.tokens.tolist() == [[length - 1] * 3] and proposal.lengths.tolist() == [3]
        seen.append(int(verdict.accept_length[0]))
        assert verdict.bonus.tolist() == [seen[-1]]  # the target's best at the last accepted node
        assert verdict.path.tolist() == [[*range(seen[-1] + 1), *[-1] * (3 - seen[-1])]]
        state, _ = absorb(drafter, view, state, [1], [0, length + 1, 0], [length - 1])
        length += 1
    assert seen == [2, 0, 3, 2, 0]


def test_never_more_than_was_verified(view, greedy):
    drafter = simulated(draft_length=3, accept_lengths=[3])
    state = drafter.init((), view, 3)
    _, verdict = accept(drafter, view, greedy, state, [0, 2, -1], [4, 4, 4], [3, 1, 0])
    assert verdict.accept_length.tolist() == [3, 1, 0]


def test_a_request_that_the_prefix_cache_begins_where_the_last_one_ended_starts_the_list_again(view):
    drafter = simulated(draft_length=3, accept_lengths=[2, 0])
    state = drafter.init((), view, 3)
    state, _ = absorb(drafter, view, state, [1], [0, 5, 0], [0])
    state, _ = absorb(drafter, view, state, [1], [0, 8, 0], [4])
    assert state.rounds.tolist() == [0, 1, 0]
    state, _ = absorb(drafter, view, state, [1], [0, 9, 0], [7], is_first=True)
    assert state.rounds.tolist() == [0, 0, 0]


def test_a_new_request_on_the_slot_starts_the_list_again(view):
    drafter = simulated(draft_length=3, accept_lengths=[2, 0])
    state = drafter.init((), view, 3)
    for lengths, context in (([4, 0, 0], 0), ([5, 0, 0], 3), ([6, 0, 0], 4)):
        state, _ = absorb(drafter, view, state, [0], lengths, [context])
    assert state.rounds.tolist() == [2, 0, 0]
    state, _ = absorb(drafter, view, state, [0], [4, 0, 0], [0])
    assert state.rounds.tolist() == [0, 0, 0]


def test_mean_is_met_by_its_floor_and_ceiling(view, greedy):
    drafter = simulated(draft_length=4, mean_accept_length=2.3, seed=5)
    state = drafter.init((), view, 3)
    lanes, verify_lengths = jnp.asarray([0, 1, 2]), jnp.asarray([4, 4, 4])
    proposal = drafter.draft((), view, state, lanes, text(4, 4, 4), greedy)

    @jax.jit
    def accepted(round_):
        then = dataclasses.replace(state, rounds=jnp.full((3,), round_))
        return drafter.verdict(then, lanes, proposal, rows(3, 5), verify_lengths).accept_length

    seen = [accepted(round_).tolist() for round_ in range(400)]
    counts = np.asarray(seen)
    assert set(counts.reshape(-1)) == {2, 3}
    assert abs(counts.mean() - 2.3) < 0.05
    assert not (counts[:, 0] == counts[:, 1]).all()  # slots are apart
    again = drafter.verdict(
        dataclasses.replace(state, rounds=jnp.full((3,), 399)),
        lanes[::-1],
        proposal,
        rows(3, 5),
        verify_lengths,
    )
    assert again.accept_length.tolist() == seen[-1][::-1]  # a function of seed, slot and round


def test_it_is_marked(view):
    assert simulated(draft_length=1, accept_lengths=(0,)).simulated


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(draft_length=0, accept_lengths=(0,)), "draft_length: expected at least 1, got 0"),
        (dict(draft_length=3), "expected either mean_accept_length or accept_lengths, got None and None"),
        (dict(draft_length=3, mean_accept_length=1.0, accept_lengths=(1,)), "got 1.0 and"),
        (dict(draft_length=3, mean_accept_length=3.5), "accept_lengths: expected 0 to 3, got 3.5"),
        (dict(draft_length=3, accept_lengths=(1, 4)), "accept_lengths: expected 0 to 3, got 4"),
        (dict(draft_length=3, accept_lengths=()), "accept_lengths: expected at least one length"),
        (dict(draft_length=3, accept_lengths=(1,), seed=-1), "seed: expected 0 to"),
    ],
    ids=str,
)
def test_lengths_that_make_no_sense_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        simulated(**arguments)
