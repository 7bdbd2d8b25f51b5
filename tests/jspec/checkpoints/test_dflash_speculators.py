"""Files of the `speculators` library; the config is what its version 0.9.0 writes for a small drafter."""

import jax.numpy as jnp
import numpy as np
import pytest
from dflash_files import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, MLP, VOCABULARY, tensors2, write

from jspec.checkpoints.dflash import load_dflash
from jspec.drafters.dflash2 import DFlash2
from jspec.drafters.dflash2_layers import Convolution, Selector


def layers(**changes):
    values = {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": HEAD_SIZE,
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "initializer_range": 0.02,
        "intermediate_size": MLP,
        "layer_types": ["full_attention", "sliding_attention"],
        "max_position_embeddings": 128,
        "max_window_layers": 28,
        "model_type": "qwen3",
        "num_attention_heads": HEADS,
        "num_hidden_layers": 2,
        "num_key_value_heads": KV_HEADS,
        "pad_token_id": None,
        "rms_norm_eps": 1e-06,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "sliding_window": 6,
        "tie_word_embeddings": False,
        "transformers_version": "5.24.0",
        "use_cache": True,
        "use_sliding_window": True,
        "vocab_size": VOCABULARY,
    }
    return {key: value for key, value in (values | changes).items() if value != "absent"}


def speculators(**changes):
    values = {
        "architectures": ["DFlash2DraftModel"],
        "auto_map": {"": "config.DFlash2SpeculatorConfig"},
        "aux_hidden_state_layer_ids": [2, 4, 0],
        "block_size": 6,
        "conv_group_size": 4,
        "conv_kernel_size": 2,
        "draft_vocab_size": VOCABULARY,
        "dtype": "float32",
        "mask_token_id": 9,
        "sample_from_anchor": False,
        "selector_rank": 3,
        "selector_top_k": 5,
        "sliding_window_non_causal": True,
        "speculators_config": {
            "algorithm": "dflash2",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "accept_tolerance": 0.0,
                    "proposal_type": "greedy",
                    "speculative_tokens": 5,
                    "verifier_accept_k": 1,
                }
            ],
            "verifier": {"architectures": ["Qwen3ForCausalLM"], "name_or_path": "x/y"},
        },
        "speculators_model_type": "dflash2",
        "speculators_version": "0.9.0",
        "target_hidden_size": None,
        "tie_word_embeddings": False,
        "transformer_layer_config": layers(),
        "transformers_version": "5.24.0",
    }
    return {key: value for key, value in (values | changes).items() if value != "absent"}


def dflash(**changes):
    own = dict.fromkeys(("conv_group_size", "conv_kernel_size", "selector_rank", "selector_top_k"), "absent")
    return speculators(speculators_model_type="dflash", architectures=["DFlashDraftModel"], **own, **changes)


def plain_tensors():
    return {
        name: array for name, array in tensors2().items() if "conv" not in name and "selector" not in name
    }


def test_a_dflash2_drafter_of_the_library(tmp_path):
    loaded = load_dflash(write(tmp_path, speculators(), tensors2()), jnp.float32)
    assert isinstance(loaded.drafter, DFlash2)
    kind = loaded.drafter.config
    assert kind.target_layer_ids == (1, 3, -1)
    assert (kind.block_size, kind.mask_token_id, kind.is_causal) == (6, 9, False)
    assert (kind.convolution, kind.selector) == (
        Convolution(taps=2, group_size=4),
        Selector(rank=3, top_k=5),
    )
    assert (kind.decoder.layer_kinds, kind.decoder.window) == (("full", "window"), 6)
    assert len(loaded.params) == len(tensors2())


@pytest.mark.parametrize(
    ("non_causal", "is_causal"), [(True, False), (False, None), ("absent", None)], ids=str
)
def test_window_layers_of_dflash_are_causal_unless_it_says_otherwise(tmp_path, non_causal, is_causal):
    values = dflash(sliding_window_non_causal=non_causal)
    kind = load_dflash(write(tmp_path, values, plain_tensors()), jnp.float32).drafter.config
    assert kind.is_causal is is_causal
    assert not kind.causal("full")


def test_window_layers_of_dflash2_are_not_causal_unless_it_says_so(tmp_path):
    values = speculators(sliding_window_non_causal="absent")
    kind = load_dflash(write(tmp_path, values, tensors2()), jnp.float32).drafter.config
    assert kind.is_causal is False


def test_copies_of_the_targets_tables_are_not_read(tmp_path):
    table = np.ones((VOCABULARY, HIDDEN), np.float32)
    copies = {
        "lm_head.weight": table,
        "verifier_lm_head.weight": table,
        "verifier_norm.weight": table[0],
        "t2d": np.ones((VOCABULARY,), np.bool_),
        "d2t": np.zeros((VOCABULARY,), np.int64),
    }
    loaded = load_dflash(write(tmp_path, speculators(), tensors2() | copies), jnp.float32)
    assert len(loaded.params) == len(tensors2())


def test_layers_may_be_called_llamas_and_windows_stand_beside_them(tmp_path):
    inner = layers(
        model_type="llama",
        mlp_bias=False,
        layer_types="absent",
        sliding_window="absent",
        use_sliding_window="absent",
        max_window_layers="absent",
    )
    values = dflash(
        transformer_layer_config=inner,
        layer_types=["full_attention", "sliding_attention"],
        sliding_window=6,
        use_sliding_window=True,
        projector_type="dflash",
        emb_dim=256,
    )
    kind = load_dflash(write(tmp_path, values, plain_tensors()), jnp.float32).drafter.config
    assert (kind.decoder.architecture, kind.decoder.window) == ("qwen3", 6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(speculators_model_type="eagle3"), "speculators_model_type: .* got 'eagle3'; not supported yet"),
        (dict(draft_vocab_size=8), "draft_vocab_size: expected 10 or none, got 8; not supported yet"),
        (dict(projector_type="domino"), "projector_type: .* got 'domino'; not supported yet"),
        (dict(aux_hidden_state_layer_ids=None), "target_layer_ids: .* got None"),
        (dict(aux_hidden_state_layer_ids=[-1]), r"target_layer_ids: .* got \[-2\]"),
        (dict(mask_token_id=None), "mask_token_id: .* got None"),
        (dict(transformer_layer_config=None), "transformer_layer_config: expected the layers' settings"),
        (dict(transformer_layer_config=layers(model_type="gemma3")), "transformer_layer_config: .*'gemma3'"),
        (dict(sliding_window=8), "sliding_window: expected one value, got 6 in .* and 8 beside it"),
        (dict(logit_scale=2.0), "logit_scale: expected no such key in a speculators config, got 2.0"),
        (dict(sample_from_anchor=True), "sample_from_anchor: .* got True"),
    ],
    ids=str,
)
def test_a_config_that_is_not_understood_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        load_dflash(write(tmp_path, speculators(**changes), tensors2()), jnp.float32)
