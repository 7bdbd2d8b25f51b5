"""Rounds on meshes of CPU devices, in a process of its own that sees eight of them."""

import pytest
from cpu_devices import run_on_devices

START = """
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jspec.sharding import make_mesh

whole, columns = PartitionSpec(), PartitionSpec(None, "tensor")
"""

CHOICES = """
from jspec.tempering import temper
from jspec.vocabulary import draw, largest
from pallas_kernels.vocabulary_row.choices import argmax

def choose(values, weights, coins, top_k, top_p):
    return (
        argmax(values),
        largest(values, 5),
        draw(weights, coins),
        temper(values, jnp.ones(6), top_k, top_p, jnp.zeros(6)).floor,
    )

mesh = make_mesh(tensor=4)
for vocabulary in (1024, 61):  # divided, odd: whole
    rng = np.random.default_rng(vocabulary)
    values = rng.integers(0, 9, size=(6, vocabulary)).astype(np.float32)  # full of ties, sums are exact
    weights = values * (rng.random(values.shape) < 0.1)
    values[1], values[2, :-1], weights[3] = 7, -np.inf, 0
    values[3, 11] = np.nan
    weights[4] = 0
    weights[4, [0, -1]] = 1
    coins = np.asarray([0, 0.25, 0.5, 0.9, 0.5, 1 - 2**-24], np.float32)
    top_k, top_p = np.asarray([0, 3, 9, 4, 60, 1], np.int32), np.asarray([0.9, 1, 0.5, 1, 0.99, 1], np.float32)
    one = jax.jit(choose)(values, weights, coins, top_k, top_p)
    parted = columns if vocabulary % 4 == 0 else whole
    values, weights = (jax.device_put(x, NamedSharding(mesh, parted)) for x in (values, weights))
    with jax.set_mesh(mesh):
        compiled = jax.jit(choose).lower(values, weights, coins, top_k, top_p).compile()
        split = compiled(values, weights, coins, top_k, top_p)
    sound = np.asarray([0, 1, 2, 4, 5])  # what is said of a row with NaN is that it has no best id
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(split), strict=True):
        np.testing.assert_array_equal(np.asarray(a)[sound], np.asarray(b)[sound])
    assert int(split[0][3]) == -1
    if vocabulary == 1024:
        assert list(np.asarray(split[1][1][1])) == [0, 1, 2, 3, 4], split[1][1][1]
        longest = [line for line in compiled.as_text().splitlines() if "all-" in line and "1024" in line.split("(")[0]]
        assert not longest, longest
    else:
        assert "all-" not in compiled.as_text()
print("equal")
"""

DISAGREEING = """
from contract.drafters import Drawn

VOCABULARY = 8
TABLE, DRAFT_TABLE = np.random.default_rng(0).normal(0, 1.5, (2, VOCABULARY, VOCABULARY)).astype(np.float32)
CONFIDENCE = np.linspace(0.05, 0.95, VOCABULARY, dtype=np.float32)

from jspec.buckets import Bucket
from jspec.decode import Method, Models
from jspec.engine import Engine
from jspec.settings import Settings
from jspec.targets.table import TableTarget

def differing(first, second, mesh):
    # An array that says of itself that it is whole on both devices, and is another one on the second.
    parts = [jax.device_put(jnp.asarray(x, jnp.float32), d) for x, d in zip((first, second), mesh.devices.flat)]
    return jax.make_array_from_single_device_arrays(parts[0].shape, NamedSharding(mesh, whole), parts)

def rounds(mesh, second_confidence=None, second_table=None):
    method = Method(target=TableTarget(vocab_size=VOCABULARY), drafter=Drawn(draft_length=3, sparse=False), scheduled=True)
    if mesh is None:
        drafter, table = (jnp.asarray(DRAFT_TABLE), jnp.asarray(CONFIDENCE)), jnp.asarray(TABLE)
    else:
        drafter = (differing(DRAFT_TABLE, DRAFT_TABLE, mesh), differing(CONFIDENCE, second_confidence, mesh))
        table = differing(TABLE, second_table, mesh)
    engine = Engine(
        method=method, models=Models(target=(table,), drafter=drafter), max_slots=2, page_size=4, chunks=(3,),
        max_stop_ids=4, max_context=32,
    )
    runner = engine._runner
    runner.method = runner.programs.method = method
    session = engine.session()
    session.add([[1, 2], [3, 4]], Settings(max_tokens=8, ignore_eos=True))
    while session._prefilling() is not None or session._waiting:
        session.step()
    bucket, lanes = Bucket(lanes=2, nodes=5, chunk=0), np.asarray([0, 1], np.int32)
    out = []
    for _ in range(3):
        proposed = runner.programs.propose(bucket, engine.models, runner.state, lanes, np.ones(2, np.int32), 3)
        executed = runner.programs.execute(bucket, engine.models, proposed.nodes, runner.state.cache, lanes)
        runner.state, report = runner.programs.settle(bucket, engine.models, proposed, executed, runner.state, lanes, None)
        proposal, text = proposed.proposal, runner.state.slots.text
        decided = (proposed.verify_lengths, proposal.tokens, report.accepted, report.tokens, text.tokens)
        out += [[np.asarray(shard.data) for shard in array.addressable_shards] for array in decided]
    return out

mesh = make_mesh(tensor=2)
for (alone,), both in zip(rounds(None), rounds(mesh, CONFIDENCE[::-1], TABLE), strict=True):
    for decided in both:
        np.testing.assert_array_equal(alone, decided)
for first, second in rounds(mesh, CONFIDENCE, TABLE[::-1]):  # another target
    np.testing.assert_array_equal(first, second)
print("one decision")
"""

TOKENS = """
from mesh_models import chain_drafter, engine_on, replicated_drafter, tree_drafter

from jspec.settings import Settings

results, makers = {}, {"chain": chain_drafter, "tree": tree_drafter, "replicated": replicated_drafter}
for name in sys.argv[3:]:
    for devices in map(int, sys.argv[1].split(",")):
        engine = engine_on(devices, makers[name], max_slots=int(sys.argv[2]))
        settings = [Settings(max_tokens=14), Settings(max_tokens=14, temperature=1.0, seed=5)]  # greedy, coupled
        done = engine.generate([[1, 2, 3, 4], [9, 8, 7]], settings)
        tokens, accepted = [list(r.token_ids) for r in done], [r.counters.accepted for r in done]
        assert results.setdefault(name, (tokens, accepted)) == (tokens, accepted), (devices, results, tokens, accepted)
        assert any(accepted), accepted
        # Two KV heads: one on each of two devices, and a copy of one on each of more; of a replicated drafter, all.
        state, split = engine._runner.state, name != "replicated"
        for pages, is_split in ((state.cache.groups[0].pages, True), (state.drafter.pages, split)):
            heads = pages.stored_k.addressable_shards[0].data.shape[2]
            assert heads == (1 if is_split and devices > 1 else 2), (devices, heads)
print("equal")
"""


def run(script: str, *arguments: str, devices: int) -> str:
    return run_on_devices(START + script, *arguments, devices=devices, timeout=450)


def test_choices_over_a_split_vocabulary_are_those_over_the_whole_one():
    assert run(CHOICES, devices=4) == "equal"


def test_devices_that_disagree_take_the_first_ones_decision():
    assert run(DISAGREEING, devices=2) == "one decision"


@pytest.mark.parametrize(
    ("devices", "slots", "drafters"),
    [
        ("1,2", "1", ("chain",)),
        pytest.param("1,2,4,8", "2", ("chain", "tree", "replicated"), marks=pytest.mark.extended),
    ],
)
def test_tokens_do_not_depend_on_the_number_of_devices(devices, slots, drafters):
    assert run(TOKENS, devices, slots, *drafters, devices=int(devices[-1])) == "equal"
