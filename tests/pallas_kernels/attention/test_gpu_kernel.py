"""The Mosaic GPU kernel of attend in the interpreter, against the dense oracle, and lowered for a GPU."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import Case, Shape, cases
from hypothesis import given, settings
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention import gpu
from pallas_kernels.attention.api import attend
from pallas_kernels.attention.pages import allocate
from pallas_kernels.attention.shapes import COMPILED
from pallas_kernels.attention.sight import causal_sight

interpreted = pytest.mark.skipif(
    jax.__version_info__ < (0, 12), reason="Mosaic GPU kernels are interpreted by jax 0.12 and newer"
)

SHAPES = [
    # GQA whose groups do not divide a tile, tree words, sinks, pages of two steps.
    Shape(
        lanes=3, queries=9, keys=9, max_queries=5, max_keys=5, columns=2, page_size=128, kv_heads=2, group=3, words=1,
        sinks=True, scale=0.06, head_size=64, dtype="bfloat16",
    ),
    # Two tiles of queries, several steps of in-flight keys, soft cap.
    Shape(
        lanes=2, queries=40, keys=80, max_queries=36, max_keys=76, columns=3, page_size=64, kv_heads=1, group=2,
        words=3, softcap=1.5, scale=0.04, head_size=128, dtype="bfloat16",
    ),
]  # fmt: skip


@functools.cache
def program(shape: Shape, races: bool):
    # Made here: jax 0.10 has no such parameters.
    interpret = plgpu.InterpretGPUParams(detect_races=races)  # pyright: ignore[reportAttributeAccessIssue]

    def run(q, k, v, pages, layer, sight, sinks):
        return gpu.attend(
            q, k, v, pages, layer, sight, shape.scale, shape.softcap, sinks, interpret=interpret
        )

    return jax.jit(run)


def check(case: Case, races: bool) -> None:
    got = program(case.shape, races)(*case.arguments())
    for result, expected in zip(got, case.expected(), strict=True):
        np.testing.assert_allclose(np.asarray(result, np.float32), expected, rtol=3e-2, atol=3e-2)


@interpreted
@settings(max_examples=10, deadline=None)
@given(cases(SHAPES))
def test_the_gpu_kernel_equals_dense_softmax_and_nothing_of_the_padding_leaks(case: Case):
    check(case, races=False)


@interpreted
@settings(max_examples=2, deadline=None)
@given(cases(SHAPES[:1]))
def test_copies_into_shared_memory_do_not_race(case: Case):
    check(case, races=True)


@interpreted
@pytest.mark.parametrize("name", ["chain", "tree of 64"])
def test_the_kernel_is_lowered_for_a_gpu(name):
    def run(q, k, v, pages, layer, sight, sinks):
        return attend(q, k, v, pages, layer, sight, scale=0.1, sinks=sinks, implementation="gpu")

    shapes = jax.eval_shape(COMPILED[name].arguments)
    text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text


def call(dtype: str = "bfloat16", head_size: int = 64, page_size: int = 64) -> tuple:
    pages = allocate(
        num_layers=1, num_pages=1, page_size=page_size, num_kv_heads=1, head_size=head_size, dtype=dtype
    )
    q = jnp.zeros((1, 1, head_size), dtype)
    ints = functools.partial(jnp.zeros, dtype=jnp.int32)
    sight = causal_sight(jnp.asarray([0, 1], jnp.int32), ints((1, 1)), ints(1), ints(1), max_queries=1)
    return q, q, q, pages, 0, sight


@interpreted
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float32"}, "expected q and pages in bfloat16"),
        ({"head_size": 80}, "expected head size 64 or 128"),
        ({"page_size": 32}, "a multiple of 64"),
    ],
)
def test_what_the_gpu_kernel_cannot_do_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        attend(*call(**change), scale=1.0, implementation="gpu")


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="this jax has what the kernel needs")
def test_an_older_jax_is_refused():
    with pytest.raises(ValueError, match="or newer"):
        attend(*call(), scale=1.0, implementation="gpu")


def test_a_gpu_gets_plain_xla_unless_the_kernel_is_asked_for():
    shape = dataclasses.replace(COMPILED["chain"], layers=1)
    shapes = jax.eval_shape(shape.arguments)
    text = (
        jax.jit(lambda *a: attend(*a[:6], scale=0.1, sinks=a[6]))
        .trace(*shapes)
        .lower(lowering_platforms=("cuda",))
        .as_text()
    )
    assert "mosaic_gpu" not in text
