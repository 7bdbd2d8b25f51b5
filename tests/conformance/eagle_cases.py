"""Golden cases of drafting with EAGLE and EAGLE-3: confirmed pairs, recurrent steps, greedy tokens."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance.dflash_cases import PAGE_SIZE, Recorded, Weights, close, same, weights_of
from safetensors.numpy import load_file

from jspec.cache import Cache, new_cache
from jspec.checkpoints.eagle import LoadedEagle, eagle_from_tensors, load_eagle
from jspec.checkpoints.eagle_config import EAGLE3
from jspec.drafters.eagle import eagle
from jspec.drafters.eagle_net import EagleNet, eagle_net
from jspec.drafters.protocol import Committed, Text
from jspec.sampling import empty_table
from jspec.targets.layers import paged
from jspec.targets.view import TargetView
from pallas_kernels.attention.pages import allocate, commit_rows
from pallas_kernels.attention.sight import causal_sight

LAYERS = 64  # of the target, where a case does not say which layers its features are


def run_eagle3(folder: Path, name: str) -> None:
    """A `g_eagle3_*` case: the net's extension and recurrent steps, then the drafter's own draft."""
    values = json.loads((folder / "g_configs.json").read_text())[name]
    arrays = load_file(folder / f"g_eagle3_{name}.safetensors")
    weights = weights_of(arrays)
    weights.setdefault("d2t", arrays["d2t"])
    tokens, features = arrays["in.tokens"], arrays["in.aux_features"]
    same(name, "extend.input_ids", tokens[1:], arrays["extend.input_ids"])
    values = {"architectures": [EAGLE3], "max_position_embeddings": 2 * len(tokens) + 16} | values
    loaded = eagle_from_tensors(
        values, Weights(where=f"{name} weights", arrays=weights), jnp.float32, num_target_layers=LAYERS
    )
    net = eagle_net(loaded.drafter.config, loaded.params)
    ids = (
        np.asarray(net.draft_ids[...])
        if net.draft_ids is not None
        else np.arange(net.config.decoder.vocab_size)
    )
    if "hot_token_id" in arrays:
        same(name, "hot_token_id", ids, arrays["hot_token_id"])
    steps = sorted({int(key[4:].split(".")[0]) for key in arrays if key.startswith("step")})
    pieces = [(net.fuse(jnp.asarray(features)), arrays["extend.input_ids"], np.arange(len(features)))]
    for i in steps:
        pieces.append(
            (
                jnp.asarray(arrays[f"step{i}.hidden_in"]),
                arrays[f"step{i}.input_id"],
                arrays[f"step{i}.position"],
            )
        )
    outputs = _run_pieces(net, pieces)
    keys = ["extend", *(f"step{i}" for i in steps)]
    for key, states in zip(keys, outputs, strict=True):
        logits = net.logits(states, _no_head)
        close(name, f"{key}.logits", logits, arrays[f"{key}.logits"])
        close(name, f"{key}.recurrent_hidden", net.fed_back(states), arrays[f"{key}.recurrent_hidden"])
        if f"{key}.normed_hidden" in arrays:
            close(name, f"{key}.normed_hidden", net.head_input(states), arrays[f"{key}.normed_hidden"])
        chosen = "extend.top1_target_id" if key == "extend" else f"{key}.next_target_id"
        same(name, chosen, ids[np.argmax(logits, axis=1)], arrays[chosen])
    expected = [arrays["extend.top1_target_id"][-1]]
    expected += [arrays[f"step{i}.next_target_id"][0] for i in steps]
    _check_draft(name, loaded, None, features, tokens, expected)


def run_eagle_greedy(folder: Path) -> None:
    """The `greedy.` part of an EAGLE training case: prefill, then steps that feed on themselves."""
    outputs, inputs = load_file(folder / "outputs.safetensors"), load_file(folder / "inputs.safetensors")
    head = load_file(folder / "target.safetensors")["lm_head.weight"]
    loaded = load_eagle(folder / "draft", jnp.float32)
    net = eagle_net(loaded.drafter.config, loaded.params)
    prefill, expected = int(outputs["greedy.prefill_len"]), outputs["greedy.tokens"][0]
    features = inputs["raw0.hidden_state"].reshape(-1, head.shape[1])[:prefill]
    tokens = inputs["raw0.input_ids"].reshape(-1)[: prefill + 1]
    states, pieces = None, [(net.fuse(jnp.asarray(features)), tokens[1:], np.arange(prefill))]
    for i, token in enumerate(expected[:-1]):
        states = net.fed_back(_run_pieces(net, pieces)[-1][-1:])
        pieces.append((states, np.array([token]), np.array([prefill + i])))
    hidden = np.stack([np.asarray(states)[-1] for states in _run_pieces(net, pieces)])
    close(folder.name, "greedy.hidden", hidden[None], outputs["greedy.hidden"])
    same(folder.name, "greedy.tokens", np.argmax(hidden @ head.T, axis=1), expected)
    _check_draft(folder.name, loaded, head, features, tokens, expected)


def _no_head(hidden: Any) -> Any:
    raise AssertionError("the case's drafter has no head of its own")


def _run_pieces(net: EagleNet, pieces: list[tuple[Any, np.ndarray, np.ndarray]]) -> list[jax.Array]:
    """Runs states and next tokens piece by piece, each kept before the next one."""
    decoder = net.config.decoder
    length = sum(len(positions) for _, _, positions in pieces)
    columns = -(-length // PAGE_SIZE)
    pages = allocate(
        num_layers=decoder.num_layers,
        num_pages=columns,
        page_size=PAGE_SIZE,
        num_kv_heads=decoder.num_kv_heads,
        head_size=decoder.head_size,
        dtype=jnp.float32,
    )
    table = jnp.arange(columns, dtype=jnp.int32)[::-1][None]
    outputs, start = [], 0
    for states, ids, positions in pieces:
        count, positions = len(positions), jnp.asarray(positions, jnp.int32)
        before = jnp.array([start], jnp.int32)
        sight = causal_sight(jnp.array([0, count], jnp.int32), table, before, positions, max_queries=count)
        out, k, v = net.step(
            net.embed(jnp.asarray(ids, jnp.int32), _no_head),
            states,
            positions,
            lambda layer, sight=sight, pages=pages: paged(decoder, pages, layer, sight),
        )
        pages = commit_rows(pages, k, v, jnp.arange(count, dtype=jnp.int32)[None], table, before)
        outputs.append(out)
        start += count
    return outputs


def _check_draft(
    name: str,
    loaded: LoadedEagle,
    head: np.ndarray | None,
    features: np.ndarray,
    tokens: np.ndarray,
    expected: Any,
) -> None:
    """The drafter absorbs all features at once, or one after the other, and drafts the expected tokens."""
    drafter = eagle(loaded.drafter.config, draft_length=len(expected))
    for pieces in ([len(features)], [1] * len(features)):
        view = _view(loaded, head, len(tokens) + len(expected))
        state, start = drafter.init(loaded.params, view, 1), 0
        lanes = jnp.zeros((1,), jnp.int32)
        text = Text(tokens=jnp.asarray(tokens[None], jnp.int32), lengths=jnp.array([len(tokens)], jnp.int32))
        absorb = jax.jit(drafter.absorb)
        for count in pieces:
            index = jnp.arange(count, dtype=jnp.int32)
            committed = Committed(
                features=jnp.asarray(features[start : start + count]),
                positions=start + index,
                path=index[None],
                context_lengths=jnp.array([start], jnp.int32),
            )
            start += count
            cache = dataclasses.replace(view.cache, lengths=jnp.array([start], jnp.int32))
            view = dataclasses.replace(view, cache=cache)
            state, ready = absorb(loaded.params, view, state, lanes, text, committed)
        assert ready.tolist() == [len(expected)], f"{name}: ready {ready}"
        sampling = empty_table(1, view.target.vocab_size, 1)
        proposal = jax.jit(drafter.draft)(loaded.params, view, state, lanes, text, sampling)
        same(name, "draft", proposal.tokens[0], np.asarray(expected))
        assert proposal.lengths.tolist() == [len(expected)], f"{name}: lengths {proposal.lengths}"


def _view(loaded: LoadedEagle, head: np.ndarray | None, max_context: int) -> TargetView:
    config = loaded.drafter.config
    target = Recorded(
        vocab_size=config.decoder.vocab_size,
        hidden_size=config.target_hidden_size,
        num_layers=config.num_target_layers or LAYERS,
        max_context=max_context,
    )
    columns = -(-max_context // PAGE_SIZE)
    cache = new_cache(
        target.groups,
        max_slots=1,
        num_pages=(columns,),
        page_size=PAGE_SIZE,
        max_context=max_context,
        dtype=jnp.dtype(jnp.float32),
    )
    table = jnp.arange(columns, dtype=jnp.int32)[::-1][None]
    group = dataclasses.replace(cache.groups[0], page_table=table)
    cache = Cache(groups=(group,), lengths=cache.lengths)
    nobody_reads = jnp.zeros((0, config.target_hidden_size))
    params = (nobody_reads, nobody_reads if head is None else jnp.asarray(head))
    return TargetView(params=params, cache=cache, target=target)
