import json
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from jspec.buckets import Bucket
from jspec.planning.configs import planned_drafter, planned_target
from jspec.planning.rounds import DescribedEngine
from jspec.sharding import make_mesh

TESTS = Path(__file__).parents[2]
TARGET = TESTS / "data" / "targets" / "llama_plain"


@pytest.fixture
def drafter(tmp_path):
    """The config of a DFlash drafter of that target, without its weights."""
    target = planned_target(TARGET)
    values = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": target.vocab_size,
        "hidden_size": target.hidden_size,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "block_size": 4,
        "num_target_layers": target.num_layers,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 1]},
    }
    (tmp_path / "config.json").write_text(json.dumps(values))
    return tmp_path


def test_an_engine_is_described_from_configs_alone(drafter):
    mesh, target = make_mesh(tensor=1), planned_target(TARGET / "config.json")
    made = planned_drafter(drafter, target, mesh, "float32", draft_length=2)
    assert made.drafter.draft_length == 2
    engine = DescribedEngine(
        target=target, drafter=made, mesh=mesh, dtype=jnp.float32, max_slots=2, max_context=32, page_size=8
    )
    assert engine.state(engine.models()).drafter.pages.stored_k.shape == (1, 8, 2, 8, 8)
    _, arguments, donated = engine.program("settle", Bucket(lanes=2, nodes=6, chunk=0))
    assert donated == (0,)
    assert arguments[3].logits.shape == (6, target.vocab_size)


def test_embeddings_are_those_that_a_program_reads():
    mesh, target = (
        make_mesh(tensor=1),
        planned_target(TARGET.parent / "llama_llama3"),
    )  # its head is another table
    plain = planned_drafter("plain", target, mesh, "float32")
    engine = DescribedEngine(target=target, drafter=plain, mesh=mesh, max_slots=1, max_context=8)

    def tables(read):
        compiled = jax.jit(read).lower(engine.models()).compile()
        return [table.shape for table in engine.embeddings_of(compiled, (engine.models(),))]

    shape = (target.vocab_size, target.hidden_size)
    assert tables(lambda models: [jnp.sin(array) for array in models.target]) == [shape]
    assert tables(lambda models: [jnp.sin(array) for array in models.target if array.shape != shape]) == []


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"target: expected a config.json or a folder with one, got '.*'; check"
    ):
        planned_target(tmp_path)
    (tmp_path / "config.json").write_text('{"architectures": ["Other"]}')
    with pytest.raises(ValueError, match=r"expected the config of a DFlash, .* or EAGLE drafter, got"):
        planned_drafter(tmp_path, planned_target(TARGET), make_mesh(tensor=1), "float32")
