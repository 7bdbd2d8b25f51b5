"""Rounds over split heads, in a process of its own that sees two CPU devices."""

import textwrap
from pathlib import Path

from cpu_devices import run_on_devices

TARGET = Path(__file__).parents[1] / "data" / "targets" / "llama_plain"

SCRIPT = textwrap.dedent("""
    import sys

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import AbstractDevice, AbstractMesh, AxisType, NamedSharding, PartitionSpec

    from jspec.checkpoints.target import load_target
    from jspec.decode import Method, Models
    from jspec.drafters.plain import plain
    from jspec.engine import Engine
    from jspec.heads import attend, commit_rows
    from jspec.schedule.allotment import allot
    from jspec.settings import Settings
    from jspec.sharding import make_mesh
    from pallas_kernels.attention.pages import allocate
    from pallas_kernels.attention.sight import causal_sight

    def ints(values):
        return jnp.asarray(values, jnp.int32)

    def run(q, k, v, survival, pages, table):
        pages = commit_rows(pages, k, v, ints([[0, 1, 2], [3, 4, -1]]), table, ints([0, 0]))
        sight = causal_sight(ints([0, 3, 5]), table, ints([3, 2]), ints([3, 4, 5, 2, 3]), max_queries=3)
        verify_lengths = allot(survival, ints([2, 3]), ints([0, 1]), 4)
        return attend(q, k[1], v[1], pages, 1, sight, scale=0.5), pages, verify_lengths

    def arguments(kv_heads, page_size):
        rng = np.random.default_rng(0)
        q = jnp.asarray(rng.normal(size=(5, 2 * kv_heads, 4)), jnp.float32)
        k, v = (jnp.asarray(rng.normal(size=(2, 5, kv_heads, 4)), jnp.float32) for _ in range(2))
        pages = allocate(
            num_layers=2, num_pages=4, page_size=page_size, num_kv_heads=kv_heads, head_size=4, dtype=jnp.float32
        )
        survival = jnp.asarray(rng.random(size=(2, 4)), jnp.float32)
        return q, k, v, survival, pages, ints([[2, 0], [1, 3]])

    heads = PartitionSpec(None, None, "tensor")
    mesh = make_mesh(tensor=2)
    for kv_heads in (2, 3):  # divided, whole on both
        given = arguments(kv_heads, page_size=2)
        whole = jax.jit(run)(*given)
        if kv_heads == 2:
            split = jax.tree.map(lambda leaf: jax.device_put(leaf, NamedSharding(mesh, heads)), given[4])
            given = (*given[:4], split, given[5])
        with jax.set_mesh(mesh):
            compiled = jax.jit(run).lower(*given).compile()
            parted = compiled(*given)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, parted)
        if kv_heads == 2:
            assert parted[1].stored_k.sharding.spec == heads, parted[1].stored_k.sharding
            assert parted[1].stored_k.addressable_shards[0].data.shape[2] == 1
            assert "all-" not in compiled.as_text()

    # The kernels lower for several TPUs: heads split, whole, and for a caller who has split the rows already.
    tpu = AbstractDevice(device_kind="TPU v6 lite", num_cores=1, platform="tpu")
    auto = (AxisType.Auto, AxisType.Auto)
    described = AbstractMesh((1, 2), ("data", "tensor"), axis_types=auto, abstract_device=tpu)

    def rows(*given):
        split = {"in_specs": PartitionSpec(), "out_specs": PartitionSpec(), "check_vma": False}
        return jax.shard_map(run, axis_names={"data", "tensor"}, **split)(*given)

    with jax.sharding.use_abstract_mesh(described):
        for function, kv_heads in ((run, 2), (run, 3), (rows, 2)):
            given = jax.eval_shape(lambda: arguments(kv_heads, page_size=128))
            text = jax.jit(function).trace(*given).lower(lowering_platforms=("tpu",)).as_text()
            assert text.count("tpu_custom_call") == 3

    # An engine whose target was loaded to a mesh uses that mesh.
    tokens = []
    for chosen in (None, mesh):
        loaded = load_target(sys.argv[1], dtype="float32", mesh=chosen)
        engine = Engine(
            method=Method(target=loaded.target, drafter=plain()),
            models=Models(target=loaded.params, drafter=()),
            max_slots=1,
            max_context=16,
            page_size=8,
            chunks=(3,),
        )
        tokens.append(engine.generate([[5, 6, 7, 8]], Settings(max_tokens=3))[0].token_ids)
    assert tokens[0] == tokens[1], tokens
    assert engine._runner.state.cache.groups[0].pages.stored_k.sharding.spec == heads
    print("equal")
""")


def test_split_heads_give_what_whole_ones_give_without_a_collective():
    assert run_on_devices(SCRIPT, str(TARGET), devices=2) == "equal"
