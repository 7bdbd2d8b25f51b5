"""Attention and commit over split heads, in a process of its own that sees two CPU devices."""

import os
import subprocess
import sys
import textwrap

SCRIPT = textwrap.dedent("""
    import functools

    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from jspec.heads import attend, commit_rows
    from jspec.sharding import make_mesh
    from pallas_kernels.attention.pages import allocate
    from pallas_kernels.attention.sight import causal_sight

    def ints(values):
        return jnp.asarray(values, jnp.int32)

    def run(q, k, v, pages, table):
        pages = commit_rows(pages, k, v, ints([[0, 1, 2], [3, 4, -1]]), table, ints([0, 0]))
        sight = causal_sight(ints([0, 3, 5]), table, ints([3, 2]), ints([3, 4, 5, 2, 3]), max_queries=3)
        return attend(q, k[1], v[1], pages, 1, sight, scale=0.5), pages

    mesh = make_mesh(tensor=2)
    split = NamedSharding(mesh, PartitionSpec(None, None, "tensor"))
    for kv_heads in (2, 3):  # divided, whole on both
        rng = np.random.default_rng(0)
        q = jnp.asarray(rng.normal(size=(5, 2 * kv_heads, 4)), jnp.float32)
        k, v = (jnp.asarray(rng.normal(size=(2, 5, kv_heads, 4)), jnp.float32) for _ in range(2))
        pages = allocate(
            num_layers=2, num_pages=4, page_size=2, num_kv_heads=kv_heads, head_size=4, dtype=jnp.float32
        )
        table = ints([[2, 0], [1, 3]])
        whole = jax.jit(run)(q, k, v, pages, table)
        if kv_heads == 2:
            pages = jax.tree.map(lambda leaf: jax.device_put(leaf, split), pages)
        with jax.set_mesh(mesh):
            compiled = jax.jit(run).lower(q, k, v, pages, table).compile()
            parted = jax.jit(run)(q, k, v, pages, table)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), whole, parted)
        if kv_heads == 2:
            assert parted[1].stored_k.sharding.spec == PartitionSpec(None, None, "tensor"), parted[1].stored_k.sharding
            assert parted[1].stored_k.addressable_shards[0].data.shape[2] == 1
            assert "all-" not in compiled.as_text()
    print("equal")
""")


def test_split_heads_give_what_whole_ones_give_without_a_collective():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env=os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "equal" in done.stdout
