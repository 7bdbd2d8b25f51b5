"""TargetRows: every setting, in its order, along the node's own path, against float64 numpy."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.round import OneHot, Proposal
from jspec.sampling import History, SamplingTable, empty_history, empty_table, settings_row, write_row
from jspec.settings import Settings
from jspec.target_rows import TargetRows, lanes_of, target_rows, token_log_probs

V = 8
STOPS = (6, 7)
EXAMPLE = np.asarray([2.0, -1.0, 0.5, 3.0, 1.5, -0.5, 2.5, 1.0])
rows_of_batch = jax.jit(target_rows)


def reference(
    logits: Sequence[float], settings: Settings, prompt: Sequence[int], output: Sequence[int]
) -> np.ndarray:
    """Probabilities of the token after prompt + output, from the definitions, in float64; one-hot if greedy."""
    logits = np.array(logits, np.float64)
    counts = np.bincount(output, minlength=V) if len(output) else np.zeros(V, int)
    seen = (counts > 0) | np.isin(np.arange(V), prompt)
    repeated = np.where(
        logits > 0, logits / settings.repetition_penalty, logits * settings.repetition_penalty
    )
    logits = np.where(seen, repeated, logits)
    logits -= settings.frequency_penalty * counts + settings.presence_penalty * (counts > 0)
    for id_, bias in settings.logit_bias.items():
        logits[id_] += bias
    if settings.allowed_token_ids is not None:
        logits[~np.isin(np.arange(V), settings.allowed_token_ids)] = -np.inf
    if len(output) < settings.min_tokens:
        logits[list(STOPS)] = -np.inf
    if settings.temperature == 0:
        return np.eye(V)[np.argmax(logits)]
    probs = np.exp((logits - logits.max()) / settings.temperature)
    order = np.argsort(-probs, kind="stable")
    if settings.top_k:
        probs[order[settings.top_k :]] = 0
    above = np.cumsum(probs[order]) - probs[order]
    if settings.top_p < 1:
        probs[order[above >= settings.top_p * probs.sum()]] = 0
    probs[probs < settings.min_p * probs.max()] = 0
    return probs / probs.sum()


def build(requests: Sequence[tuple[Settings, Sequence[int], Sequence[int]]]) -> tuple[SamplingTable, History]:
    """Table and history of slots with (settings, prompt, output)."""
    table, history = empty_table(len(requests), V, 2), empty_history(len(requests), V)
    counts, seen = np.zeros((len(requests), V), np.int32), np.zeros((len(requests), V), bool)
    for slot, (settings, prompt, output) in enumerate(requests):
        table = write_row(table, jnp.int32(slot), settings_row(settings, STOPS, 0, V, 2))
        np.add.at(counts[slot], list(output), 1)
        seen[slot, list(prompt)] = True
    return table, dataclasses.replace(
        history, output_counts=jnp.asarray(counts), prompt_seen=jnp.asarray(seen)
    )


def proposal_of(tokens: Sequence[Sequence[int]], parents: Sequence[Sequence[int]] | None = None) -> Proposal:
    lanes, drafts = len(tokens), len(tokens[0])
    return Proposal(
        tokens=jnp.asarray(np.asarray(tokens, np.int32)),
        parents=None if parents is None else jnp.asarray(np.asarray(parents, np.int32)),
        tree_depth=0 if parents is None else drafts,
        lengths=jnp.full((lanes,), drafts, jnp.int32),
        q=OneHot(),
    )


def one_lane(
    settings: Settings,
    logits: Sequence[Sequence[float]],
    drafts: Sequence[int] = (),
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    parents: Sequence[int] | None = None,
) -> TargetRows:
    """Rows of one request, padded to 5 rows of NaN and 4 draft tokens, so that all tests share a program."""
    table, history = build([(settings, prompt, output)])
    padded = np.full((5, V), np.nan, np.float32)
    padded[: len(logits)] = logits
    tokens = [*drafts, *[3] * (4 - len(drafts))]
    return rows_of_batch(
        jnp.asarray(padded),
        table,
        history,
        jnp.asarray([0]),
        jnp.asarray([0]),
        proposal_of([tokens], None if parents is None else [parents]),
        jnp.asarray([len(output)]),
    )


def probs_at(rows: TargetRows, lane: int, node: int) -> np.ndarray:
    """A row as probabilities; one-hot at the best id if the row is greedy."""
    nodes = jnp.full((rows.starts.shape[0],), node, jnp.int32)
    return np.exp(np.asarray(rows.row(nodes), np.float64)[lane])


ALL = dict(
    temperature=0.7,
    top_k=6,
    top_p=0.9,
    min_p=0.05,
    repetition_penalty=1.3,
    presence_penalty=0.4,
    frequency_penalty=0.6,
    logit_bias={0: 1.5, 4: -np.inf},
    allowed_token_ids=(0, 1, 2, 3, 4, 6, 7),
    min_tokens=4,
)


@pytest.mark.parametrize(
    "settings",
    [
        Settings(temperature=1.0),
        Settings(temperature=0.3),
        Settings(temperature=2.5),
        Settings(temperature=1.0, top_k=3),
        Settings(temperature=1.0, top_k=100),
        Settings(temperature=1.0, top_p=0.8),
        Settings(temperature=1.0, min_p=0.2),
        Settings(temperature=2.0, top_k=5, top_p=0.7, min_p=0.3),
        Settings(temperature=1.0, repetition_penalty=1.7),
        Settings(temperature=1.0, repetition_penalty=0.6),
        Settings(temperature=1.0, presence_penalty=0.9),
        Settings(temperature=1.0, frequency_penalty=0.7),
        Settings(temperature=1.0, frequency_penalty=-0.7),
        Settings(temperature=1.0, logit_bias={2: 3.0, 3: -np.inf}),
        Settings(temperature=1.0, allowed_token_ids=(1, 5)),
        Settings(temperature=1.0, min_tokens=4),
        Settings(**ALL),
    ],
    ids=lambda s: ",".join(
        f.name for f in dataclasses.fields(s) if getattr(s, f.name) != f.default and f.name != "logit_bias"
    ),
)
def test_each_setting_acts_on_every_row_of_the_block(settings):
    prompt, output, drafts = [1, 3], [2, 3], [3, 2, 5]
    logits = np.stack([np.roll(EXAMPLE, shift) for shift in range(4)]).astype(np.float32)
    rows = one_lane(settings, logits, drafts, prompt, output)
    for node in range(4):
        expected = reference(logits[node], settings, prompt, output + drafts[:node])
        np.testing.assert_allclose(probs_at(rows, 0, node), expected, atol=2e-6, err_msg=f"node {node}")
        ids = jnp.arange(V, dtype=jnp.int32)[None, :]
        log_probs = rows.log_prob(jnp.full((1, V), node), ids)
        np.testing.assert_allclose(np.exp(log_probs[0]), expected, atol=2e-6)


def test_slots_of_one_batch_keep_their_own_settings():
    requests = [
        (Settings(), [0], [1]),
        (Settings(**ALL), [1, 3], [2, 3]),
        (Settings(temperature=1.0, seed=4), [5], []),
        (Settings(repetition_penalty=3.0), [3], [6]),
        (Settings(temperature=1.3, top_p=0.6), [2], [2, 2, 2]),
    ]
    drafts = [[3, 6], [2, 2], [7, 0], [3, 3], [1, 4]]
    logits = np.random.default_rng(0).normal(size=(15, V)).astype(np.float32) * 2
    table, history = build(requests)
    order = [3, 0, 4, 2, 1]
    rows = rows_of_batch(
        jnp.asarray(logits),
        table,
        history,
        jnp.asarray(order),
        jnp.arange(5, dtype=jnp.int32) * 3,
        proposal_of([drafts[slot] for slot in order]),
        jnp.asarray([len(requests[slot][2]) for slot in order]),
    )
    best = np.asarray(rows.argmax(jnp.broadcast_to(jnp.arange(3, dtype=jnp.int32), (5, 3))))
    for lane, slot in enumerate(order):
        settings, prompt, output = requests[slot]
        for node in range(3):
            expected = reference(logits[3 * lane + node], settings, prompt, output + drafts[slot][:node])
            assert best[lane, node] == np.argmax(expected)
            if settings.temperature > 0:
                np.testing.assert_allclose(probs_at(rows, lane, node), expected, atol=2e-6)


def test_temperature_comes_before_top_p():
    # At temperature 2 the probabilities are .629, .231, .140; filtered before, the third would be lost.
    settings = Settings(temperature=2.0, top_p=0.9, allowed_token_ids=(0, 1, 2))
    rows = one_lane(settings, [[3.0, 1.0, 0.0] + [0.0] * 5])
    np.testing.assert_allclose(probs_at(rows, 0, 0)[:3], [0.629, 0.231, 0.140], atol=6e-4)


def test_greedy_row_in_a_sampled_batch_keeps_its_logits():
    table, history = build([(Settings(), [], []), (Settings(temperature=0.5), [], [])])
    logits = jnp.asarray([[4.0, 2.0, 1.0, 0.0, 4.0, 0.0, 0.0, 0.0]] * 2)
    both, none = jnp.asarray([0, 1]), jnp.asarray([0, 0])
    rows = rows_of_batch(logits, table, history, both, both, proposal_of([[], []]), none)
    np.testing.assert_array_equal(rows.logits[0], logits[0])
    np.testing.assert_array_equal(rows.argmax(jnp.zeros((2, 1), jnp.int32)), [[0], [0]])


def test_small_temperature_stays_finite():
    rows = one_lane(Settings(temperature=1e-6), [[90.0, 89.0] + [-90.0] * 5 + [90.0]])
    np.testing.assert_allclose(probs_at(rows, 0, 0), [0.5, 0, 0, 0, 0, 0, 0, 0.5], atol=1e-6)


def test_penalties_see_the_draft_tokens_before_each_row():
    # A target that loops on id 5: with a frequency penalty of 2, the third 5 in a row is no longer its best.
    logits = [[0.0, 0.0, 0.0, 1.0, 0.0, 4.5, 0.0, 0.0]] * 5
    rows = one_lane(Settings(frequency_penalty=2.0), logits, [5, 5, 5, 5], prompt=[0])
    np.testing.assert_array_equal(rows.argmax(jnp.arange(5, dtype=jnp.int32)[None, :]), [[5, 5, 3, 3, 3]])


def test_siblings_do_not_see_each_other():
    # Node 1 and node 2 hang on the anchor, node 3 on node 2, node 4 on node 3.
    parents = [0, 0, 2, 3]
    settings = Settings(temperature=1.0, frequency_penalty=0.8, min_tokens=2)
    logits = np.random.default_rng(1).normal(size=(5, V)).astype(np.float32)
    rows = one_lane(settings, logits, [3, 4, 4, 1], prompt=[0], parents=parents)
    for node, path in enumerate([[], [3], [4], [4, 4], [4, 4, 1]]):
        expected = reference(logits[node], settings, [0], path)
        np.testing.assert_allclose(probs_at(rows, 0, node), expected, atol=2e-6)


def test_minimum_length_counts_the_path():
    # One token emitted, minimum 3: the anchor's row and the next may not stop, the third may.
    logits = [[0.0, 1.0, 0, 0, 0, 0, 5.0, 6.0]] * 3
    rows = one_lane(Settings(min_tokens=3), logits, [1, 1], prompt=[0], output=[2])
    np.testing.assert_array_equal(rows.argmax(jnp.asarray([[0, 1, 2]])), [[1, 1, 7]])


@pytest.mark.parametrize(
    "settings", [Settings(), Settings(temperature=1.0, top_p=0.9), Settings(logit_bias={1: 2.0})]
)
def test_mask_bits_forbid_ids_on_every_row(settings):
    vocabulary = 40  # two words, the second partly used
    allowed = np.random.default_rng(2).random((3, vocabulary)) < 0.3
    allowed[:, 35] = True
    words = np.zeros((3, 2), np.uint32)
    for row, id_ in np.argwhere(allowed):
        words[row, id_ // 32] |= np.uint32(1) << np.uint32(id_ % 32)
    logits = np.random.default_rng(3).normal(size=(3, vocabulary)).astype(np.float32)
    table = write_row(
        empty_table(1, vocabulary, 2), jnp.int32(0), settings_row(settings, STOPS, 0, vocabulary, 2)
    )
    rows = rows_of_batch(
        jnp.asarray(logits),
        table,
        empty_history(1, vocabulary),
        jnp.asarray([0]),
        jnp.asarray([0]),
        proposal_of([[1, 2]]),
        jnp.asarray([0]),
        jnp.asarray(words.view(np.int32)),
    )
    assert (np.isneginf(np.asarray(rows.logits)) == ~allowed).all()


def test_rows_of_no_lane_and_broken_rows_disturb_nobody():
    requests = [
        (Settings(**ALL), [1, 3], [2, 3]),
        (Settings(), [0], [1]),
        (Settings(temperature=1.0, top_p=0.5), [2], []),
    ]
    table, history = build(requests)
    logits = np.random.default_rng(5).normal(size=(8, V)).astype(np.float32)
    # Lanes: slot 0 with 2 rows, padding, slot 2 with 1 row, slot 1 with 3 rows, padding; rows 6 and 7 belong to none.
    lanes, starts = jnp.asarray([0, -1, 2, 1, -1]), jnp.asarray([0, 2, 2, 3, 6])
    drafts = proposal_of([[3, 9], [-5, 99], [7, -1], [4, 6], [0, 0]])
    emitted = jnp.asarray([2, 0, 0, 1, 0])

    def run(values: np.ndarray) -> TargetRows:
        return rows_of_batch(jnp.asarray(values), table, history, lanes, starts, drafts, emitted)

    clean = run(logits)
    for broken_rows in ([6, 7], [2], [3, 4, 5], [0, 1]):
        broken = logits.copy()
        broken[broken_rows] = np.nan
        others = [row for row in range(6) if row not in broken_rows]
        got = run(broken)
        for name in ("logits", "log_normaliser", "floor"):
            np.testing.assert_array_equal(
                np.asarray(getattr(got, name))[others], np.asarray(getattr(clean, name))[others]
            )
    np.testing.assert_allclose(
        probs_at(clean, 0, 1), reference(logits[1], requests[0][0], [1, 3], [2, 3, 3]), atol=2e-6
    )
    np.testing.assert_allclose(
        probs_at(clean, 2, 0), reference(logits[2], requests[2][0], [2], []), atol=2e-6
    )
    assert int(clean.argmax(jnp.full((5, 1), 2))[3, 0]) == np.argmax(logits[5])


def test_rows_belong_to_the_last_lane_that_starts_there():
    np.testing.assert_array_equal(lanes_of(jnp.asarray([0, 2, 2, 3, 6]), 8), [0, 0, 2, 3, 3, 3, 4, 4])
    np.testing.assert_array_equal(lanes_of(jnp.asarray([0, 0, 1]), 2), [1, 2])


def test_ids_outside_the_vocabulary_have_no_probability():
    rows = one_lane(Settings(temperature=1.0), EXAMPLE[None])
    got = rows.log_prob(jnp.asarray([[0, 0, 0, 0]]), jnp.asarray([[-1, V, 3, 0]]))
    np.testing.assert_array_equal(np.isneginf(got), [[True, True, False, False]])


def test_greedy_batch_is_left_untouched():
    logits = np.asarray([[1.0, -np.inf, 3.0, 3.0, np.inf, 0.0, 0.0, 0.0]] * 5, np.float32)
    rows = one_lane(Settings(), logits, prompt=[1], output=[2])
    np.testing.assert_array_equal(rows.logits, logits)


def test_log_probs_are_those_of_the_raw_model():
    logits = np.asarray([[1.0, 2.0, 2.0, 0.0], [0.0, 0.0, 5.0, 1.0], [9.0, 0.0, 0.0, 0.0]], np.float32)
    exact = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    got = token_log_probs(
        jnp.asarray(logits),
        jnp.asarray([[1, 0], [2, 99]]),
        jnp.asarray([[3, 2], [0, -1]]),
        jnp.asarray(True),
        top=2,
    )
    np.testing.assert_allclose(got.chosen[0], [exact[1, 3], exact[0, 2]], atol=1e-6)
    np.testing.assert_array_equal(got.top_ids[0], [[2, 3], [1, 2]])
    np.testing.assert_allclose(got.top[0, 1], [exact[0, 1], exact[0, 1]], atol=1e-6)
    np.testing.assert_allclose(got.chosen[1, 0], exact[2, 0], atol=1e-6)


def test_log_probs_of_the_chosen_token_alone_or_not_at_all():
    arguments = jnp.asarray([[1.0, 2.0]]), jnp.asarray([[0]]), jnp.asarray([[1]])
    alone = token_log_probs(*arguments, jnp.asarray(True), top=0)
    assert alone.top.shape == (1, 1, 0)
    np.testing.assert_allclose(alone.chosen, [[-np.log1p(np.exp(-1.0))]], atol=1e-6)
    np.testing.assert_array_equal(token_log_probs(*arguments, jnp.asarray(False), top=0).chosen, [[0.0]])
