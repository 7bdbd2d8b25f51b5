import dataclasses
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from jspec import Settings
from jspec.capture import Capture, capture, capture_one
from jspec.checkpoints.target import load_target
from jspec.decode import Method, Models
from jspec.drafters.ngram import ngram
from jspec.engine import Engine
from jspec.features import layer_outputs
from jspec.objectives.batch import TrainBatch
from jspec.slots import slots_of
from jspec.targets.table import TableTarget

TESTS = Path(__file__).parents[1]
TARGETS = TESTS / "data" / "targets"
NAMES = ("embedding", "layer.1", "final_norm")
BUCKETS = (8, 16, 24)
LENGTHS = (5, 8, 9, 24, 17)


@pytest.fixture(scope="module")
def tiny():
    return load_target(TARGETS / "llama_plain", dtype="float32")


@pytest.fixture(scope="module")
def windowed():
    return load_target(TARGETS / "gemma3_new", dtype="float32")


def texts(vocabulary, lengths=LENGTHS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, vocabulary, length).astype(np.int32) for length in lengths]


def padded(rows, tokens, padding=0):
    return np.stack([np.pad(row, (0, tokens - len(row)), constant_values=padding) for row in rows])


def bits(array):
    return np.ascontiguousarray(array).tobytes()


@pytest.mark.parametrize("case", ["target_llama", "target_qwen3"])
def test_features_are_the_hidden_states_that_transformers_gives(case):
    folder = TESTS / "conformance" / "cases" / "train" / case
    inputs, outputs = (load_file(folder / f"{name}.safetensors") for name in ("inputs", "outputs"))
    loaded = load_target(folder / "draft", dtype="float32")
    layers = json.loads((folder / "meta.json").read_text())["dflash_layer_ids_3"]
    names = (*layer_outputs(layers), "final_norm")
    lengths = inputs["attention_mask"].sum(axis=1).astype(np.int32)

    got = jax.jit(lambda ids: capture(loaded.target, loaded.params, ids, lengths, names, dtype="float32"))(
        inputs["input_ids"].astype(np.int32)
    )

    wanted = [outputs[f"hidden_states.{i + 1}"] for i in layers] + [outputs["last_hidden_post_norm"]]
    for row, length in enumerate(lengths):
        expected = np.concatenate([state[row, :length] for state in wanted], axis=1)
        np.testing.assert_allclose(got[row, :length], expected, rtol=1e-4, atol=2e-5)
        assert not np.asarray(got[row, length:]).any()


def test_a_sample_alone_in_any_batch_and_in_any_order_has_the_same_bits(tiny):
    rows = texts(tiny.target.vocab_size)
    chosen = Capture(target=tiny.target, names=NAMES, dtype="float32", buckets=BUCKETS)
    sizes = [next(size for size in BUCKETS if len(row) <= size) for row in rows]
    alone = [
        np.asarray(capture_one(chosen, tiny.params, np.pad(row, (0, size - len(row))), np.int32(len(row))))
        for row, size in zip(rows, sizes, strict=True)
    ]

    @jax.jit
    def together(ids, lengths):
        return capture(tiny.target, tiny.params, ids, lengths, NAMES, dtype="float32", buckets=BUCKETS)

    no_token = tiny.target.vocab_size + 7  # its embedding is NaN
    for order, tokens in (((0, 1, 2, 3, 4), 24), ((4, 1, 0, 3, 3), 24), ((2, 4), 17)):
        ids = padded([rows[i] for i in order], tokens, no_token)
        got = np.asarray(together(ids, np.array([len(rows[i]) for i in order], np.int32)))
        for place, i in enumerate(order):
            assert bits(got[place, : len(rows[i])]) == bits(alone[i][: len(rows[i])])
            assert not got[place, len(rows[i]) :].any()


def test_pieces_through_a_cache_agree_with_the_whole(windowed):
    (text,) = texts(windowed.target.vocab_size, [150])
    whole, cut = (
        Capture(target=windowed.target, names=NAMES, dtype="float32", buckets=buckets)
        for buckets in ((150,), (40,))
    )
    expected = capture_one(whole, windowed.params, text, np.int32(150))

    assert cut.sizes(150) == (40, 160)
    got = [
        np.asarray(capture_one(cut, windowed.params, np.pad(text, (0, size - 150)), np.int32(150)))
        for size in (160, 240)
    ]

    np.testing.assert_allclose(got[0][:150], expected, atol=1e-5, rtol=1e-5)
    assert bits(got[0][:150]) == bits(got[1][:150])  # room for longer texts changes nothing
    assert not got[0][150:].any()


def test_texts_packed_into_a_row_have_the_features_that_they_have_alone(tiny):
    a, b, c, d = texts(tiny.target.vocab_size, [5, 9, 8, 17])
    chosen = Capture(target=tiny.target, names=NAMES, buckets=BUCKETS)
    ids = padded([np.concatenate([a, b, c]), d], 24, padding=3)
    segments = padded([np.repeat([1, 2, 3], [5, 9, 8]), np.ones(17)], 24).astype(np.int32)
    batch = TrainBatch(
        ids=jnp.asarray(ids),
        loss_mask=jnp.ones(ids.shape, bool),
        segments=jnp.asarray(segments),
        positions=jnp.zeros_like(ids),
        features=jnp.zeros((2, 24, 0)),
    )

    got = jax.jit(chosen.batch)(tiny.params, batch)

    assert got.features.dtype == jnp.bfloat16
    for row, start, text in ((0, 0, a), (0, 5, b), (0, 14, c), (1, 0, d)):
        alone = jax.jit(chosen.any_length)(tiny.params, jnp.asarray(text), jnp.int32(len(text)))
        assert bits(got.features[row, start : start + len(text)]) == bits(alone)
    assert not np.asarray(got.features[0, 22:], np.float32).any()
    assert not np.asarray(got.features[1, 17:], np.float32).any()


def test_bfloat16_features_are_the_rounded_float32_ones(tiny):
    (text,) = texts(tiny.target.vocab_size, [8])
    exact, rounded = (
        capture_one(
            Capture(target=tiny.target, names=NAMES, dtype=dtype, buckets=BUCKETS),
            tiny.params,
            text,
            np.int32(8),
        )
        for dtype in ("float32", "bfloat16")
    )
    assert bits(np.asarray(exact).astype(ml_dtypes.bfloat16)) == bits(rounded)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recording:
    """N-gram drafting that keeps every feature it is handed, by slot and position."""

    inner: ngram
    features: tuple[str, ...]
    capacity: int
    name: str = "recording"
    draft_length: int = 3
    draft_depth: int = 3
    simulated: bool = False

    def init(self, params, target, max_slots):
        width = len(self.features) * target.target.hidden_size
        return self.inner.init(params, target, max_slots), jnp.full(
            (max_slots, self.capacity, width), jnp.nan
        )

    def draft(self, params, target, state, lanes, text, sampling):
        return self.inner.draft(params, target, state[0], lanes, text, sampling)

    def absorb(self, params, target, state, lanes, text, committed):
        inner, ready = self.inner.absorb(params, target, state[0], lanes, text, committed)
        nodes = jnp.maximum(committed.path, 0)
        places = jnp.where(committed.path >= 0, committed.positions[nodes], self.capacity)
        slots = slots_of(lanes, state[1].shape[0])
        kept = state[1].at[slots[:, None], places].set(committed.features[nodes], mode="drop")
        return (inner, kept), ready


def test_features_are_what_decoding_hands_to_a_drafter(windowed):
    drafter = Recording(inner=ngram(draft_length=3, min_n=1, max_n=2), features=NAMES, capacity=64)
    engine = Engine(
        method=Method(target=windowed.target, drafter=drafter),
        models=Models(target=windowed.params, drafter=()),
        max_slots=2,
        max_context=64,
        page_size=8,
        chunks=(7,),
    )
    prompts = [row.tolist() for row in texts(windowed.target.vocab_size, [19, 6])]

    results = engine.generate(prompts, Settings(max_tokens=24))

    assert sum(result.counters.accepted for result in results) > 0
    kept = np.asarray(engine._runner.state.drafter[1])
    chosen = Capture(target=windowed.target, names=NAMES, dtype="float32", buckets=(64,))
    for slot, result in enumerate(results):
        text = np.array([*result.prompt_ids, *result.token_ids], np.int32)
        known = len(text) - 1  # the last token emitted was never executed
        got = capture_one(chosen, windowed.params, np.pad(text, (0, 64 - len(text))), np.int32(len(text)))
        np.testing.assert_allclose(kept[slot, :known], got[:known], atol=1e-5, rtol=1e-5)
        assert np.isnan(kept[slot, known:]).all()


class Counting(TableTarget):
    traces = 0

    def forward(self, *arguments, **options):
        Counting.traces += 1
        return super().forward(*arguments, **options)


def test_programs_are_bounded_by_the_sizes():
    target = Counting(vocab_size=8, max_context=128)
    chosen = Capture(target=target, names=("layer.0",), buckets=(8, 16))
    sizes = chosen.sizes(70)
    assert sizes == (8, 16, 80)
    for length in range(1, 71):
        size = next(size for size in sizes if length <= size)
        capture_one(chosen, (jnp.zeros((8, 8)),), np.zeros(size, np.int32), np.int32(length))
    assert Counting.traces == 3


def test_devices_capture_their_own_rows():
    script = textwrap.dedent("""
        import sys

        import jax
        import jax.numpy as jnp
        import numpy as np

        from jspec.checkpoints.target import load_target
        from jspec.objectives.batch import TrainBatch
        from jspec.sharding import make_mesh
        from jspec.capture import Capture

        path = sys.argv[1]
        mesh = make_mesh(data=4, tensor=2)
        one, many = load_target(path, dtype="float32"), load_target(path, dtype="float32", mesh=mesh)
        chosen = Capture(target=one.target, names=("layer.0", "layer.1"), dtype="float32", buckets=(16,))
        ids = np.random.default_rng(0).integers(0, one.target.vocab_size, (8, 16)).astype(np.int32)
        segments = np.where(np.arange(16)[None] < 5, 1, np.where(np.arange(16)[None] < 14, 2, 0)) + np.zeros_like(ids)
        split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        batch = TrainBatch(
            ids=jnp.asarray(ids), loss_mask=jnp.ones(ids.shape, bool), segments=jnp.asarray(segments),
            positions=jnp.zeros_like(ids), features=jnp.zeros((8, 16, 0)),
        )
        alone = jax.jit(chosen.batch)(one.params, batch).features
        got = jax.jit(lambda p, b: chosen.batch(p, b, mesh))(many.params, jax.device_put(batch, split)).features
        assert got.sharding.spec[0] == "data", got.sharding
        np.testing.assert_allclose(np.asarray(got), np.asarray(alone), atol=2e-5)
        print("all equal")
    """)
    result = subprocess.run(
        [sys.executable, "-c", script, str(TARGETS / "llama_plain")],
        env=os.environ
        | {
            "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
        capture_output=True,
        text=True,
    )
    assert result.stdout.strip() == "all equal", result.stderr


def test_what_cannot_be_captured_is_refused(tiny):
    with pytest.raises(ValueError, match="layer 9 does not exist; the model has 3 layers"):
        Capture(target=tiny.target, names=("layer.9",))
    with pytest.raises(ValueError, match="names: expected at least one state"):
        Capture(target=tiny.target, names=())
    with pytest.raises(ValueError, match="dtype: expected one of float32, bfloat16, got 'int8'"):
        Capture(target=tiny.target, names=NAMES, dtype="int8")
    with pytest.raises(ValueError, match="buckets: expected ascending positive sizes"):
        Capture(target=tiny.target, names=NAMES, buckets=(16, 8))
