"""Decoding with trees on a real decoder: plain decoding's text, and the cache that plain decoding leaves."""

import functools
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from contract.tree_drafters import Scripted

from jspec.checkpoints.target import load_target
from jspec.decode import Method, Models
from jspec.drafters.plain import plain
from jspec.drafters.tree_shape import static_tree
from jspec.engine import Engine
from jspec.results import add
from jspec.settings import Settings
from pallas_kernels.attention.pages import gather_rows

# Windows of 5 positions and layers without one.
FOLDER = Path(__file__).parents[1] / "data" / "targets" / "gemma3_new"
# Most ways down are no dense prefix of the nodes, and the longest is longer than a window.
LONGEST = (2, 0, 1, 0, 0, 0)
SHAPE = static_tree(
    [[0], [1], [0, 0], [0, 1], [1, 0], [2, 0, 0], *(LONGEST[:length] for length in range(1, 7))]
)
NEW, CONTEXT = 26, 45  # the first prompt's text ends with its context
GREEDY = Settings(max_tokens=NEW, ignore_eos=True)


@functools.cache
def model():
    return load_target(FOLDER, dtype="float32")


def engine(drafter, params=()):
    return Engine(
        method=Method(target=model().target, drafter=drafter),
        models=Models(target=model().params, drafter=params),
        max_slots=2,
        max_context=CONTEXT,
        page_size=4,
        chunks=(7,),
    )


def prompts() -> list[list[int]]:
    rng, vocabulary = np.random.default_rng(4), model().target.vocab_size
    return [[first, *rng.integers(0, vocabulary, length).tolist()] for first, length in ((3, 18), (5, 2))]


def cache_rows(used, results):
    """Keys and values of each text in every layer, of a window its last tokens."""
    rows = []
    for slot, result in enumerate(results):
        length = len(result.prompt_ids) + NEW - 1  # the last token was never executed
        for group, layout in zip(used._runner.state.cache.groups, used.method.target.groups, strict=True):
            first = 0 if layout.window is None else max(length - layout.window, 0)
            for layer in range(layout.num_layers):
                both = gather_rows(group.pages, layer, group.page_table[slot][None], length)
                rows += [np.asarray(array[0, first:]) for array in both]
    return rows


@functools.cache
def plain_engine():
    return engine(plain())


@functools.cache
def plain_text():
    results = plain_engine().generate(prompts(), GREEDY)
    return results, cache_rows(plain_engine(), results)


@functools.cache
def scripted_engine():
    return engine(Scripted(shape=SHAPE), known_texts(6, []))


def known_texts(right, results):
    lines = np.zeros((2, CONTEXT), np.int32)
    for line, result in zip(lines, results, strict=False):
        text = [*result.prompt_ids, *result.token_ids]
        line[: len(text)] = text
    sizes = (model().target.vocab_size, right, SHAPE.draft_length)
    return (jnp.asarray(lines), *map(jnp.int32, sizes))


def scripted(right, results):
    """The engine whose drafter knows these texts."""
    used = scripted_engine()
    used.models = Models(target=used.models.target, drafter=known_texts(right, results))
    return used


@pytest.mark.parametrize("right", [6, 1])
def test_text_and_cache_are_those_of_plain_decoding(right):
    expected, expected_rows = plain_text()
    used = scripted(right, expected)
    results = used.generate(prompts(), GREEDY)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert set(used.programs.traces.values()) == {1}
    histogram = add([result.counters for result in results]).accept_histogram
    assert all(histogram[accepted] for accepted in ((2, 3, 6) if right == 6 else (1,)))
    assert len(histogram) == 7  # by depth, not by node
    for got, wanted in zip(cache_rows(used, results), expected_rows, strict=True):
        np.testing.assert_allclose(got, wanted, atol=2e-5, rtol=2e-5)


def test_seeded_text_equals_plain_decoding_with_that_seed():
    settings = Settings(max_tokens=NEW, temperature=0.8, top_p=0.95, seed=11, ignore_eos=True)
    expected = plain_engine().generate(prompts(), settings)
    results = scripted(6, expected).generate(prompts(), settings)
    assert [r.token_ids for r in results] == [r.token_ids for r in expected]
    assert sum(r.counters.accepted for r in results) > NEW


@pytest.mark.parametrize("room", range(1, 9))
def test_trees_end_with_the_request(room):
    expected = plain_text()[0]
    used = scripted(6, expected)
    result = used.generate([prompts()[0]], Settings(max_tokens=room, ignore_eos=True))[0]
    assert result.token_ids == expected[0].token_ids[:room]
    assert result.counters.committed == room - 1
    # A draft token deeper than what may be emitted is not verified.
    within = [sum(len(path) <= depth for path in SHAPE.paths) for depth in range(7)]
    if room <= 3:
        assert result.counters.verified <= within[max(room - 2, 0)]
