"""Golden cases of DFlash 2: its convolution, its selector, and whole drafts."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance.dflash_cases import Ready, absorbed, close, compare_drafts, same, weights_of
from conformance.training_records import meta_of, part_of
from jaxtyping import Array
from safetensors.numpy import load_file

from jspec.checkpoints.dflash_config import ARCHITECTURE_2
from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash2_lattice import (
    Candidates,
    Score,
    Walk,
    candidate_scores,
    greedy_choice,
    lattice,
    sampled_choice,
    top_candidates,
    walk,
)
from jspec.drafters.dflash2_layers import Convolution, GroupedConvolution
from jspec.drafters.dflash_net import DFlashConfig, draft_logits
from jspec.targets.config import DecoderConfig
from jspec.targets.rope import Rope

LEAST_TEMPERATURE = 1e-5  # where these cases clamp


def dflash2_names(folder: Path) -> list[str]:
    """Cases in `f_configs.json` that are DFlash 2 drafters, without the `f_` of their files."""
    configs = json.loads((folder / "f_configs.json").read_text())
    return [name for name, values in configs.items() if values["architectures"] == [ARCHITECTURE_2]]


def run_selector_conv(folder: Path) -> None:
    """Every convolution and selector of the `e_` file, and the transform of the logits."""
    arrays = load_file(folder / "e_dflash2_selector_conv.safetensors")
    cases = json.loads((folder / "e_dflash2_selector_conv.json").read_text())
    for case in cases:
        if isinstance(case["id"], str):
            _run_convolution(case, _part(arrays, f"{case['id']}."))
        else:
            _run_selector(f"s{case['id']}", _part(arrays, f"s{case['id']}."))
    for key, expected in arrays.items():
        if key.startswith("unary.out_mult"):
            multiplier, _, cap = key.removeprefix("unary.out_mult").partition("_cap")
            config = _transforming(float(multiplier), float(cap) if cap else None)
            close("unary", key, draft_logits(config, jnp.asarray(arrays["unary.in"])), expected)


def run_dflash2_case(folder: Path, name: str) -> None:
    """Absorbs the recorded features and drafts, greedily and with the recorded random numbers."""
    values = json.loads((folder / "f_configs.json").read_text())[name]
    arrays = load_file(folder / f"f_{name}.safetensors")
    ready = absorbed(name, values, weights_of(arrays), arrays)
    compare_drafts(name, ready, arrays)
    candidates, score = _compare_lattice(name, ready, arrays)
    drawn = jax.jit(lambda: _mixed_walk(arrays, arrays["in.anchors"], candidates, score))()
    same(name, "selector_tokens", drawn.tokens, arrays["selector_tokens"])
    close(name, "q_rows", drawn.probs, arrays["q_rows"])
    if "draft_tokens_greedy" in arrays:
        same(name, "draft_tokens_greedy", jnp.argmax(ready.logits, axis=2), arrays["draft_tokens_greedy"])
    _compare_greedy(name, ready, arrays["candidate_ids"], arrays["lattice"])


def run_dflash2_infer(folder: Path) -> None:
    """One request cut at several anchors, with the weights and tables of another case."""
    meta = meta_of(folder)
    outputs, draft = load_file(folder / "outputs.safetensors"), part_of(folder, "draft")
    values = json.loads((draft / "config.json").read_text())
    weights = load_file(draft / "model.safetensors")
    tables = load_file(part_of(folder, "target.safetensors"))
    for anchor in meta["anchors"]:
        name, recorded = f"{folder.name} a{anchor}", _part(outputs, f"a{anchor}.")
        arrays = {
            "in.anchors": outputs["sequence_ids"][:, anchor],
            "in.ctx_lens": np.asarray([anchor]),
            "in.target_features": outputs["context_features"][:, :anchor],
            "in.target_embed": tables["embed_tokens.weight"],
            "in.target_lm_head": tables["lm_head.weight"],
            "block_ids": recorded["block_ids"],
            "hidden": recorded["draft_hidden"].reshape(-1, recorded["draft_hidden"].shape[2]),
            "candidate_ids": recorded["candidate_ids"],
            "unary_logits": recorded["unary_topk"],
            "lattice": recorded["lattice"],
        }
        ready = absorbed(name, values, weights, arrays)
        compare_drafts(name, ready, arrays)
        _compare_lattice(name, ready, arrays)
        tokens = _compare_greedy(name, ready, arrays["candidate_ids"], arrays["lattice"])
        same(name, "greedy_tokens", tokens, recorded["greedy_tokens"])


def _transforming(multiplier: float, cap: float | None) -> DFlashConfig:
    """A drafter of which only the transform of the logits matters."""
    decoder = DecoderConfig(
        architecture="qwen3",
        vocab_size=2,
        hidden_size=2,
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
    return DFlashConfig(
        decoder=decoder,
        block_size=2,
        mask_token_id=0,
        target_layer_ids=(0,),
        num_target_layers=None,
        target_hidden_size=2,
        output_multiplier=multiplier,
        final_softcap=cap,
    )


def _run_convolution(case: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> None:
    sizes = Convolution(taps=case["taps"], group_size=case["group_size"])
    conv = GroupedConvolution(case["hidden"], case["block_size"], sizes, jnp.dtype(jnp.float32))
    conv.base_kernel[...] = jnp.asarray(arrays["base_kernel"])
    conv.kernel_projection[...] = jnp.asarray(arrays["kernel_projection"].T)
    x, out = jnp.asarray(arrays["x"]), jnp.asarray(arrays["sublayer_out"])
    prepared, added = jax.jit(conv.prepare)(x)
    close(case["id"], "prepared", prepared, arrays["prepared"])
    close(case["id"], "finish_coefficients", added, arrays["finish_coefficients"])
    finished = jax.jit(conv.finish)(out, added)
    close(case["id"], "finished", finished, arrays["finished"])


def _run_selector(name: str, arrays: Mapping[str, np.ndarray]) -> None:
    projected = jnp.asarray(arrays["hidden_states"] @ arrays["hidden_projection"].T)
    ids, unary = jnp.asarray(arrays["candidate_ids"]), jnp.asarray(arrays["unary_logits"])
    before, after = jnp.asarray(arrays["predecessor_codebook"]), jnp.asarray(arrays["successor_codebook"])
    candidates = Candidates(ids=ids, unary=unary)
    anchors = jnp.asarray(arrays["anchor_token_ids"])

    def score(row: int, tokens: Array) -> Array:
        return candidate_scores(projected[:, row], before[tokens], after[ids[:, row]], unary[:, row])

    def everything() -> tuple[Array, Walk, Walk]:
        scores = lattice(
            lambda tokens: candidate_scores(projected, before[tokens], after[ids], unary), anchors, candidates
        )
        greedy = walk(anchors, ids, score, lambda row, scores: greedy_choice(scores))
        return scores, greedy, _mixed_walk(arrays, arrays["anchor_token_ids"], candidates, score)

    scores, greedy, drawn = jax.jit(everything)()
    close(name, "lattice", scores, arrays["lattice"])
    same(name, "greedy_tokens", greedy.tokens, arrays["greedy_tokens"])
    close(name, "greedy_q_rows", greedy.probs, arrays["greedy_q_rows"])
    same(name, "tokens", drawn.tokens, arrays["tokens"])
    close(name, "q_rows", drawn.probs, arrays["q_rows"])
    dense = np.zeros(arrays["q_dense"].shape, np.float32)
    np.put_along_axis(dense, arrays["candidate_ids"], np.asarray(drawn.probs), axis=2)
    close(name, "q_dense", dense, arrays["q_dense"])


def _compare_lattice(name: str, ready: Ready, arrays: Mapping[str, np.ndarray]) -> tuple[Candidates, Score]:
    """Compares candidates and lattice; returns them with the scores as a walk asks for them."""
    config = ready.loaded.drafter.config
    selector = dflash_net(config, ready.loaded.params).candidate_selector
    assert selector is not None and config.selector is not None
    candidates = top_candidates(ready.logits, config.selector.top_k)
    same(name, "candidate_ids", candidates.ids, arrays["candidate_ids"])
    close(name, "unary_logits", candidates.unary, arrays["unary_logits"])
    projected, anchors = selector.project(ready.row_hidden), jnp.asarray(arrays["in.anchors"])

    def scored(tokens: Array) -> Array:
        return selector.scores(projected, tokens, candidates.ids, candidates.unary)

    scores = jax.jit(lambda: lattice(scored, anchors, candidates))()
    close(name, "lattice", scores, arrays["lattice"])

    def score(row: int, tokens: Array) -> Array:
        return selector.scores(projected[:, row], tokens, candidates.ids[:, row], candidates.unary[:, row])

    return candidates, score


def _mixed_walk(
    arrays: Mapping[str, np.ndarray], anchors: np.ndarray, candidates: Candidates, score: Score
) -> Walk:
    """Greedy requests beside sampled ones, with the recorded random numbers."""
    greedy, uniforms = jnp.asarray(arrays["greedy_mask"]), jnp.asarray(arrays["uniforms"])
    temperatures = jnp.maximum(jnp.asarray(arrays["temperatures"]), LEAST_TEMPERATURE)

    def choose(row: int, scores: Array) -> tuple[Array, Array]:
        best, mass = greedy_choice(scores)
        index, probs = sampled_choice(scores, temperatures, uniforms[:, row])
        return jnp.where(greedy, best, index), jnp.where(greedy[:, None], mass, probs)

    return walk(jnp.asarray(anchors), candidates.ids, score, choose)


def _compare_greedy(name: str, ready: Ready, ids: np.ndarray, scores: np.ndarray) -> np.ndarray:
    """What the drafter proposes greedily is the recorded lattice's path of best steps."""
    index, path = np.zeros(len(ids), np.int64), []
    lane = np.arange(len(ids))
    for row in range(ids.shape[1]):
        index = np.argmax(scores[lane, row, index], axis=1)
        path.append(ids[lane, row, index])
    expected = np.stack(path, axis=1)
    same(name, "proposal", ready.proposal.tokens, expected)
    return expected


def _part(arrays: Mapping[str, np.ndarray], prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): array for key, array in arrays.items() if key.startswith(prefix)}
