"""Decoder targets against transformers, and the promises of `execute` and `commit` on real layers."""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file
from target_chain import continue_greedily, run_chain

from jspec.cache import Cache, Group, commit, new_cache
from jspec.checkpoints.target import LoadedTarget, load_target
from jspec.round import Nodes
from jspec.targets.decoder import DecoderTarget, decoder_leaves
from jspec.targets.layers import project, rms_norm
from jspec.targets.target import Target

FOLDER = Path(__file__).parents[2] / "data" / "targets"
CASES = sorted(path.name for path in FOLDER.iterdir())


def load(case: str) -> LoadedTarget:
    return load_target(FOLDER / case, dtype="float32")


def all_states(target: DecoderTarget) -> tuple[str, ...]:
    """As transformers lists hidden states: the last layer's output only after the final norm."""
    return ("embedding", *(f"layer.{i}" for i in range(target.num_layers - 1)), "final_norm")


@pytest.mark.parametrize("case", CASES)
def test_chunks_and_single_tokens_equal_one_pass_of_transformers(case):
    loaded, expected = load(case), load_file(FOLDER / case / "expected.safetensors")
    names = all_states(loaded.target)

    run = run_chain(
        loaded.target, loaded.params, expected["ids"].tolist(), [19, 19, 1, 1], names, capacity=48
    )

    hidden = np.stack(np.split(run.features, len(names), axis=1))
    np.testing.assert_allclose(hidden, expected["hidden"], atol=1e-4)
    np.testing.assert_allclose(run.logits, expected["logits"], atol=1e-4)
    new = continue_greedily(loaded.target, loaded.params, run, 8, names)
    assert new == expected["greedy"][-8:].tolist()


@pytest.mark.parametrize("case", ["llama_plain", "gemma3_old"])
def test_one_pass_equals_one_pass_of_transformers(case):
    loaded, expected = load(case), load_file(FOLDER / case / "expected.safetensors")

    run = run_chain(loaded.target, loaded.params, expected["ids"].tolist())

    np.testing.assert_allclose(run.logits, expected["logits"], atol=1e-4)


def test_attends_in_flight_to_what_the_cache_will_hold():
    loaded = load("llama_plain")
    ids = load_file(FOLDER / "llama_plain" / "expected.safetensors")["ids"].tolist()

    whole = run_chain(loaded.target, loaded.params, ids, dtype=jnp.bfloat16)
    parts = run_chain(loaded.target, loaded.params, ids, [20, 20], dtype=jnp.bfloat16)

    # Attending to unrounded keys in flight moves logits by 0.04; a key on the edge between two
    # bfloat16 values may fall to either side.
    np.testing.assert_allclose(parts.logits, whole.logits, atol=2e-3)


def test_lanes_and_padding_do_not_touch_each_other():
    """Slot 2 has 20 tokens committed and runs 3, slot 0 starts with 5; a lane and 3 nodes are padding."""
    loaded = load("gemma3_old")
    target, params = loaded.target, loaded.params
    expected = load_file(FOLDER / "gemma3_old" / "expected.safetensors")
    ids = expected["ids"].tolist()
    before = run_chain(target, params, ids[:20], capacity=23)

    cache = new_cache(
        target.groups,
        max_slots=3,
        num_pages=(20, 20),
        page_size=8,
        max_context=48,
        dtype=jnp.dtype("float32"),
    )
    table = 1 + jnp.arange(18, dtype=jnp.int32).reshape(3, 6)
    groups = []
    for group, solo in zip(cache.groups, before.cache.groups, strict=True):
        # Every free page holds NaN; the pages of slot 2 come from a run of its own.
        pages = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), group.pages)
        pages = jax.tree.map(
            lambda pool, filled: pool.at[:, table[2, :3]].set(filled[:, 1:4]), pages, solo.pages
        )
        groups.append(Group(pages=pages, page_table=table))
    cache = Cache(groups=tuple(groups), lengths=jnp.array([0, 0, 20], jnp.int32))
    nodes = Nodes(
        tokens=jnp.array([*ids[20:23], *ids[:5], 0, 0, 0], jnp.int32),
        positions=jnp.array([20, 21, 22, 0, 1, 2, 3, 4, 0, 0, 0], jnp.int32),
        parents=jnp.array([-1, 0, 1, -1, 0, 1, 2, 3, -1, -1, -1], jnp.int32),
        offsets=jnp.array([0, 3, 8, 8], jnp.int32),
        certain_lengths=jnp.array([3, 5, 0], jnp.int32),
    )
    lanes = jnp.array([2, 0, -1], jnp.int32)

    path = jnp.array([[0, 1, 2, -1, -1], [3, 4, 5, 6, 7], [-1] * 5], jnp.int32)

    @functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
    def execute_and_commit(params, nodes, cache, lanes, path):
        out = target.forward(params, nodes, cache, lanes, (), 6)
        return target.logits(params, out.hidden), commit(cache, out.pending, path, lanes)

    logits, cache = execute_and_commit(params, nodes, cache, lanes, path)

    np.testing.assert_allclose(logits[:3], expected["logits"][20:23], atol=1e-4)
    np.testing.assert_allclose(logits[3:8], expected["logits"][:5], atol=1e-4)
    assert cache.lengths.tolist() == [5, 0, 23]


def test_features_come_in_the_order_asked_and_may_repeat():
    loaded, expected = load("qwen3_window"), load_file(FOLDER / "qwen3_window" / "expected.safetensors")
    names = ("layer.1", "embedding", "layer.0", "layer.1", "final_norm")

    run = run_chain(loaded.target, loaded.params, expected["ids"][:3].tolist(), capture=names)

    wanted = np.concatenate([expected["hidden"][state, :3] for state in (2, 0, 1, 2, 3)], axis=1)
    np.testing.assert_allclose(run.features, wanted, atol=1e-4)


def test_capturing_a_layer_that_is_not_there_is_refused():
    loaded = load("llama_plain")
    with pytest.raises(ValueError, match="features: layer 3 does not exist; the model has 3 layers"):
        run_chain(loaded.target, loaded.params, [5], capture=("layer.3",))


def test_is_a_hashable_target_with_its_groups():
    target = load("gemma3_old").target

    assert isinstance(target, Target)
    assert hash(target) == hash(DecoderTarget(dataclasses.replace(target.config)))
    assert [(g.num_layers, g.window) for g in target.groups] == [(1, None), (3, 6)]
    assert target.identity == "gemma3, 4 layers, hidden 24, 4/2 heads of 8, vocabulary 61"


def test_a_model_of_window_layers_only_keeps_an_empty_full_group():
    config = dataclasses.replace(load("qwen3_window").target.config, layer_kinds=("window",) * 3)
    target, params = DecoderTarget(config), load("qwen3_window").params
    ids = list(range(5, 35))

    whole, parts = run_chain(target, params, ids), run_chain(target, params, ids, [15, 15])

    assert [g.num_layers for g in target.groups] == [0, 3]
    np.testing.assert_allclose(parts.logits, whole.logits, atol=3e-5)


def test_a_token_outside_the_window_is_out_of_sight():
    """Three layers of window 9 reach back 24 positions: the first token cannot move the 26th."""
    config = dataclasses.replace(load("qwen3_window").target.config, layer_kinds=("window",) * 3)
    target, params = DecoderTarget(config), load("qwen3_window").params
    ids = list(range(5, 34))

    one, other = (run_chain(target, params, [first, *ids]).logits for first in (3, 4))

    np.testing.assert_array_equal(one[25:], other[25:])
    assert not np.allclose(one[24], other[24])


def test_attention_soft_cap_reaches_attention():
    loaded, expected = load("llama_plain"), load_file(FOLDER / "llama_plain" / "expected.safetensors")
    ids, plain = expected["ids"][:9].tolist(), expected["logits"][:9]

    def capped(cap: float) -> np.ndarray:
        config = dataclasses.replace(loaded.target.config, attention_softcap=cap)
        return run_chain(DecoderTarget(config), loaded.params, ids).logits

    np.testing.assert_allclose(capped(1e4), plain, atol=1e-3)
    assert np.abs(capped(0.5) - plain).max() > 0.1


def test_bfloat16_stays_near_float32():
    loaded = load_target(FOLDER / "gemma3_new", dtype="bfloat16")
    expected = load_file(FOLDER / "gemma3_new" / "expected.safetensors")

    run = run_chain(loaded.target, loaded.params, expected["ids"].tolist(), dtype=jnp.bfloat16)

    assert np.corrcoef(run.logits.ravel(), expected["logits"].ravel())[0, 1] > 0.995


def test_one_bfloat16_row_equals_that_row_among_others():
    x = jax.random.normal(jax.random.key(0), (3, 32), jnp.bfloat16)
    weight = jax.random.normal(jax.random.key(1), (32, 16), jnp.bfloat16)
    bias = jnp.ones((16,), jnp.bfloat16)

    alone = project(x[1:2], weight, bias)

    assert alone.shape == (1, 16) and alone.dtype == jnp.bfloat16
    np.testing.assert_array_equal(alone[0], project(x, weight, bias)[1])


def test_norm_is_taken_in_float32():
    x = jnp.array([[300.0, 400.0]], jnp.float16)  # squares overflow float16

    np.testing.assert_allclose(rms_norm(x, jnp.array([1.0, 2.0]), 0.0), [[0.8486, 2.2627]], rtol=1e-3)


def test_ids_outside_the_vocabulary_give_nan():
    for case in ("llama_plain", "llama_linear_bias"):  # tied and not
        loaded = load(case)
        rows = loaded.target.embed(loaded.params, jnp.array([[60, 61]]))
        assert np.isnan(rows[0, 1]).all() and not np.isnan(rows[0, 0]).any()


def test_another_models_params_are_refused():
    with pytest.raises(ValueError, match=r"params: expected 29 arrays of llama, .*, got 41; pass"):
        load("llama_plain").target.embed(load("gemma3_new").params, jnp.array([5]))


def test_a_tied_model_holds_one_table():
    shapes = [leaf.shape for leaf in decoder_leaves(load("llama_plain").target.config, jnp.dtype("float32"))]

    assert [shape for shape in shapes if 61 in shape] == [(24, 61)]
