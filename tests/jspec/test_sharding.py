"""Loading to a mesh, in a process of its own that sees four CPU devices."""

import textwrap
from pathlib import Path

import jax
import pytest
from cpu_devices import run_on_devices

from jspec.sharding import leaf_sharding, make_mesh

TESTS = Path(__file__).parents[1]

SCRIPT = textwrap.dedent("""
    import json
    import sys
    from pathlib import Path

    import jax
    import numpy as np
    from conformance.dflash_cases import Weights
    from safetensors.numpy import load_file
    from target_chain import run_chain

    from jspec.checkpoints.dflash import dflash_from_tensors
    from jspec.checkpoints.target import load_target
    from jspec.drafters.dflash import dflash_leaves, dflash_net
    from jspec.sharding import make_mesh
    from jspec.targets.decoder import decoder_leaves

    folder = Path(sys.argv[1])
    ids = list(range(5, 29))

    for case in ("llama_linear_bias", "gemma3_old"):  # one KV head, two KV heads
        whole = load_target(folder / case, dtype="float32")
        split = load_target(folder / case, dtype="float32", mesh=make_mesh(tensor=2))
        leaves = decoder_leaves(whole.target.config, "float32")
        for leaf, one, two in zip(leaves, whole.params, split.params, strict=True):
            assert two.sharding.num_devices == 2
            parts = 2 if {"heads", "mlp", "kv_heads"} & set(leaf.axes) else 1
            assert two.addressable_shards[0].data.size * parts == two.size, leaf
            if "kv_heads" in leaf.axes and whole.target.config.num_kv_heads == 1:  # each device has a copy
                two, same = np.split(np.asarray(two), 2, axis=-1)
                np.testing.assert_array_equal(two, same)
            np.testing.assert_array_equal(one, two, err_msg=leaf.path)
        one = run_chain(whole.target, whole.params, ids, [12, 12])
        two = run_chain(split.target, split.params, ids, [12, 12])
        np.testing.assert_allclose(two.logits, one.logits, atol=3e-5)

    cases = Path(sys.argv[2])
    for name in ("dflash", "dflash2"):
        values = json.loads((cases / "f_configs.json").read_text())[name]
        arrays = load_file(cases / f"f_{name}.safetensors").items()
        weights = Weights(where=name, arrays={k.removeprefix("w."): v for k, v in arrays if k[:2] == "w."})
        whole = dflash_from_tensors(values, weights, "float32")
        split = dflash_from_tensors(values, weights, "float32", mesh=make_mesh(tensor=2))
        leaves = dflash_leaves(whole.drafter.config, "float32")
        for leaf, one, two in zip(leaves, whole.params, split.params, strict=True):
            np.testing.assert_array_equal(one, two, err_msg=leaf.path)
            parts = 2 if {"heads", "kv_heads", "mlp", "vocabulary"} & set(leaf.axes) else 1
            assert two.addressable_shards[0].data.size * parts == one.size, leaf
        width = next(leaf.shape[0] for leaf in leaves if leaf.path == "fc")
        features = np.linspace(-1, 1, 3 * width, dtype=np.float32).reshape(3, -1)
        nets = [dflash_net(loaded.drafter.config, loaded.params) for loaded in (whole, split)]
        one, two = (net.context_rows(features, np.arange(3)) for net in nets)
        np.testing.assert_allclose(two, one, atol=3e-5)
        if nets[0].candidate_selector is not None:
            projected, before = np.ones((2, 6), np.float32), np.asarray([3, 40])
            ids, unary = np.asarray([[1, 63], [32, 31]]), np.zeros((2, 2), np.float32)
            one, two = (net.candidate_selector.scores(projected, before, ids, unary) for net in nets)
            np.testing.assert_allclose(two, one, atol=3e-5)

    try:
        load_target(folder / "llama_plain", dtype="float32", mesh=make_mesh(tensor=3))
    except ValueError as error:
        assert "mesh: expected an axis 'tensor' that divides the model's 4 heads, got 3" in str(error), error
    else:
        raise AssertionError("three devices cannot share four heads")
    copied = load_target(folder / "llama_plain", dtype="float32", mesh=make_mesh(data=4, tensor=1)).params
    assert all(leaf.is_fully_replicated for leaf in copied)
    print("all equal")
""")


def test_meshes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="mesh: expected data 1 x tensor 99 devices, got"):
        make_mesh(tensor=99)
    explicit = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Explicit,))
    with pytest.raises(ValueError, match="mesh: expected axes of type Auto"):
        leaf_sharding(("heads",), {"heads": 4}, explicit)


def test_a_sharded_target_equals_the_whole_one():
    folders = TESTS / "data" / "targets", TESTS / "conformance" / "cases" / "serve"
    assert run_on_devices(SCRIPT, *map(str, folders), devices=4) == "all equal"
