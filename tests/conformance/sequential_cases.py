"""Golden cases of DSpark and Domino drafts: heads, walks and confidence."""

import json
from collections.abc import Mapping
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from conformance.dflash_cases import absorbed, close, compare_drafts, same, weights_of
from safetensors.numpy import load_file

from jspec.checkpoints.sequential_config import DSPARK
from jspec.coins import gumbel
from jspec.drafters.dflash import dflash_net
from jspec.drafters.domino_head import Gru, GruHead
from jspec.drafters.dspark import best_columns
from jspec.drafters.dspark_heads import MarkovHead
from jspec.drafters.sequential import best_choice, correction, noisy_choice, teacher_forced, walk
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope


def dspark_names(folder: Path) -> list[str]:
    """Cases in `f_configs.json` that are DSpark drafters, without the `f_` of their files."""
    configs = json.loads((folder / "f_configs.json").read_text())
    return [name for name, values in configs.items() if values["architectures"] == [DSPARK]]


def run_dspark_case(folder: Path, name: str) -> None:
    """Absorbs the recorded features and drafts greedily; then reads the recorded draws as known tokens."""
    values = json.loads((folder / "f_configs.json").read_text())[name]
    arrays = load_file(folder / f"f_{name}.safetensors")
    ready = absorbed(name, values, weights_of(arrays), arrays)
    compare_drafts(name, ready, arrays)
    close(name, "base_logits", ready.logits, arrays["base_logits"])
    same(name, "greedy_tokens", ready.proposal.tokens, arrays["greedy_tokens"])
    net = dflash_net(ready.loaded.drafter.config, ready.loaded.params)
    assert net.head is not None
    for tokens, corrected in (
        ("greedy_tokens", "greedy_corrected_logits"),
        ("sampled_tokens_philox_offset0", "sampled_corrected_logits"),
    ):
        read = _read(net.head, arrays["in.anchors"], arrays[tokens])
        latents = teacher_forced(net.head, ready.row_hidden, read)
        close(name, corrected, ready.logits + correction(latents, net.head.output[...]), arrays[corrected])
    if "confidence_raw" in arrays:
        assert net.confidence_head is not None
        read = _read(net.head, arrays["in.anchors"], arrays["greedy_tokens"])
        close(
            name,
            "confidence_raw",
            net.confidence_head.logits(ready.row_hidden, read),
            arrays["confidence_raw"],
        )
        # What a calibration makes of the drafter's confidence, which it reads as a logit.
        confidence = np.asarray(ready.proposal.confidence)
        logit = np.log(confidence) - np.log1p(-confidence)
        calibrated = jax.nn.sigmoid(logit / arrays["sts_temperatures"][None])
        close(name, "confidence", calibrated, arrays["confidence"])


def run_domino_rollout(folder: Path) -> None:
    """Every rollout of the `x_` file: greedy lines over a pool of candidates or the whole vocabulary."""
    arrays = load_file(folder / "x_domino_rollout.safetensors")
    for name in sorted({key.partition(".")[0] for key in arrays}):
        _run_rollout(name, {k.partition(".")[2]: v for k, v in arrays.items() if k.startswith(f"{name}.")})


def run_markov_sample(folder: Path) -> None:
    """Tokens of recorded uniform numbers; where these come from is another generator's business."""
    arrays = load_file(folder / "x_markov_sample.safetensors")
    for name in sorted({key.partition(".")[0] for key in arrays}):
        case = {k.partition(".")[2]: jnp.asarray(v) for k, v in arrays.items() if k.startswith(f"{name}.")}
        scores, temperatures = case["base_logits"] + case["bias"], case["temperatures"]
        close(name, "step_logits", scores, arrays[f"{name}.step_logits"])
        sampled = temperatures > 0
        noise = gumbel(case["uniform"])
        drawn = noisy_choice(scores, jnp.where(sampled, temperatures, 1), noise)
        tokens = jnp.where(sampled, drawn, best_choice(scores)[0])
        same(name, "tokens", tokens, arrays[f"{name}.tokens"])


def _read(head: MarkovHead | GruHead, anchors: np.ndarray, tokens: np.ndarray) -> jax.Array:
    """What a head reads of the tokens before each of these."""
    before = jnp.concatenate([jnp.asarray(anchors)[:, None], jnp.asarray(tokens)[:, :-1]], axis=1)
    return head.read(before, lambda ids: ids)


def _run_rollout(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    shifted, pool_size = (int(v) for v in arrays["cfg_shift_label_pool"])
    blocks, block, hidden_size = arrays["draft_hidden"].shape
    sizes = Gru(size=arrays["gru_w_hh"].shape[1], rank=len(arrays["embed_proj0"]))
    vocabulary = len(arrays["embedding"])
    head = GruHead(_decoder(hidden_size, vocabulary), sizes, vocabulary, jnp.dtype(jnp.float32))
    for leaf, tensor in (
        (head.gru_input, "gru_w_ih"),
        (head.gru_state, "gru_w_hh"),
        (head.mix, "embed_proj0"),
        (head.output, "embed_proj2"),
    ):
        leaf[...] = jnp.asarray(arrays[tensor].T)
    hidden = jnp.asarray(arrays["draft_hidden"])[:, : block - 1] if shifted else arrays["draft_hidden"][:, 1:]
    embedding, anchors = jnp.asarray(arrays["embedding"]), jnp.asarray(arrays["bonus_tokens"], jnp.int32)
    logits = jnp.asarray(hidden) @ arrays["lm_head"].T
    pool = None
    if 0 < pool_size < vocabulary:
        pool = best_columns(logits, pool_size)
        logits = jnp.take_along_axis(logits, pool[:, None], axis=2)
    line = walk(
        head,
        lambda ids: embedding[ids],
        anchors,
        jnp.ones((blocks,), bool),
        jnp.asarray(hidden),
        logits,
        lambda row, scores: best_choice(scores),
        ids=pool,
        pool=pool,
    )
    same(name, "proposals", line.tokens, arrays["proposals"])


def _decoder(hidden_size: int, vocab_size: int) -> DecoderConfig:
    """Layers of which only the sizes of their outputs matter."""
    return DecoderConfig(
        architecture="qwen3",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2,
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_size=2,
        norm_eps=1e-6,
        max_context=8,
        full_rope=Rope(theta=1e4),
        layer_kinds=("full",),
        query_key_norm=True,
        query_scale=1.0,
    )
