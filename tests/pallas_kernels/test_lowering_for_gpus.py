"""What every kernel becomes where there is none: plain XLA, lowered for a GPU that is not here."""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.attention.api import attend
from pallas_kernels.attention.shapes import COMPILED as ATTENTION
from pallas_kernels.block_attention.api import attend_blocks
from pallas_kernels.block_attention.shapes import COMPILED as BLOCKS
from pallas_kernels.commit.api import commit_rows
from pallas_kernels.commit.shapes import COMPILED as COMMIT
from pallas_kernels.survival.api import allot
from pallas_kernels.survival.shapes import COMPILED as SURVIVAL
from pallas_kernels.vocabulary_row.api import temper
from pallas_kernels.vocabulary_row.shapes import COMPILED as VOCABULARY_ROW


def lowered(function, arguments) -> str:
    """The program for a GPU, in StableHLO."""
    shapes = jax.eval_shape(arguments)
    return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def largest_made(text: str) -> int:
    """Elements of the largest array that the program makes, arguments and what is written into them aside."""
    given = set(re.findall(r"%arg\d+: tensor<([\dx]+)x\w+>", text))
    made = {shape for shape in re.findall(r"tensor<([\dx]+)x[a-z]\w*>", text)} - given
    return max(math.prod(int(n) for n in shape.split("x")) for shape in made)


def blocks_with_gradients(*arguments):
    def loss(*floats):
        return jnp.sum(attend_blocks(*floats, *arguments[5:], scale=0.1).astype(jnp.float32))

    return jax.grad(loss, argnums=(0, 1, 2, 3, 4))(*arguments[:5])


CASES = {
    "attend": (lambda *a: attend(*a[:6], scale=0.1, sinks=a[6]), ATTENTION["chain"]),
    "commit_rows": (commit_rows, COMMIT["round"]),
    "allot": (allot, SURVIVAL["16 chains"]),
    "temper": (temper, VOCABULARY_ROW["plain"]),
    "attend_blocks": (blocks_with_gradients, BLOCKS["window"]),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_gets_plain_xla(name):
    function, shape = CASES[name]
    text = lowered(function, shape.arguments)
    assert "tpu_custom_call" not in text and "func.func public @main" in text


def test_nothing_is_made_over_the_context():
    shape = ATTENTION["chain"]
    text = lowered(CASES["attend"][0], shape.arguments)
    page = shape.page_size * shape.kv_heads * shape.head_size
    queries = 2 * shape.slots * shape.nodes * shape.heads * shape.head_size
    assert largest_made(text) <= max(page, queries)
    assert page < shape.context * shape.kv_heads * shape.head_size / 16


def test_nothing_is_made_over_blocks_and_tokens():
    shape = BLOCKS["qwen3 8b"]
    text = lowered(blocks_with_gradients, shape.arguments)
    assert largest_made(text) <= 4 * shape.blocks * shape.block_size * shape.heads * shape.head_size
    assert largest_made(text) < shape.score_bytes / 4 / 16
