"""Rounds that execute a prompt's chunk and decode change nothing but when tokens come."""

import dataclasses

import numpy as np
import pytest
from contract.engines import DRAFTERS, shared
from contract.test_overlap import PROMPTS, SETTINGS, without_inert

LONG = [[i % 8 for i in range(21)], [3, 3, 1] * 7, *PROMPTS]
LONG_SETTINGS = [SETTINGS[0], SETTINGS[1], *SETTINGS]


def run(used, *, mixed, overlap=False, prompts=LONG, settings=LONG_SETTINGS):
    """Results, and the buckets of the rounds."""
    used.forget_prefixes()
    used._runner._rng = np.random.default_rng(7)
    free, buckets = used.free_pages, []
    with used.session(
        mixed=mixed, overlap=overlap, observer=lambda requests, bucket, round_, report: buckets.append(bucket)
    ) as session:
        indices = session.add(prompts, settings)
        while session.busy:
            session.step()
        results = [session.result(index) for index in indices]
        assert not any(request.executing for request in session._requests.values())
    assert used.free_pages == free and len(used._runner.free_slots) == used.max_slots
    return results, buckets


def are_mixed(buckets):
    return [bucket for bucket in buckets if bucket.chunk and bucket.lanes > 1]


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    "drafter",
    [
        name if name in ("ngram", "dense") else pytest.param(name, marks=pytest.mark.extended)
        for name in DRAFTERS
    ],
)
def test_results_are_those_of_prompts_executed_alone(drafter, overlap):
    used = shared(drafter, mixed_chunks=(3,), max_slots=3)
    mixed, buckets = run(used, mixed=True, overlap=overlap)
    alone, others = run(used, mixed=False, overlap=overlap)
    assert without_inert(mixed) == without_inert(alone)
    assert are_mixed(buckets) and not are_mixed(others)
    assert len(buckets) < len(others)
    assert set(used.programs.traces.values()) == {1}
