"""Golden cases of drafting with EAGLE and EAGLE-3: confirmed pairs, recurrent steps, greedy tokens."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from conformance.dflash_cases import PAGE_SIZE, Recorded, Weights, close, same, weights_of
from conformance.training_records import part_of
from safetensors.numpy import load_file

from jspec.cache import Cache, new_cache
from jspec.checkpoints.eagle import eagle_from_tensors, load_eagle
from jspec.checkpoints.eagle_config import EAGLE3
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.drafters.eagle import Eagle, eagle
from jspec.drafters.eagle_net import EagleNet, eagle_net
from jspec.drafters.protocol import Committed, Text
from jspec.sampling import empty_table
from jspec.targets.config import LayerKind
from jspec.targets.layers import paged_layers
from jspec.targets.view import TargetView
from pallas_kernels.attention.pages import allocate
from pallas_kernels.attention.sight import Sight, causal_sight

# Compiling takes far longer than running.
_JIT = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
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
    states = [net.fuse(jnp.asarray(features)), *(arrays[f"step{i}.hidden_in"] for i in steps)]
    next_tokens = [arrays["extend.input_ids"], *(arrays[f"step{i}.input_id"] for i in steps)]
    positions = [np.arange(len(features)), *(arrays[f"step{i}.position"] for i in steps)]
    outputs = _run(net, *(np.concatenate(parts) for parts in (states, next_tokens, positions)))
    outputs = np.split(outputs, np.cumsum([len(part) for part in positions])[:-1])
    keys = ["extend", *(f"step{i}" for i in steps)]
    for key, out in zip(keys, outputs, strict=True):
        out = jnp.asarray(out)
        logits = net.logits(out, _no_head)
        close(name, f"{key}.logits", logits, arrays[f"{key}.logits"])
        close(name, f"{key}.recurrent_hidden", net.fed_back(out), arrays[f"{key}.recurrent_hidden"])
        if f"{key}.normed_hidden" in arrays:
            close(name, f"{key}.normed_hidden", net.head_input(out), arrays[f"{key}.normed_hidden"])
        chosen = "extend.top1_target_id" if key == "extend" else f"{key}.next_target_id"
        same(name, chosen, ids[np.argmax(logits, axis=1)], arrays[chosen])
    expected = [arrays["extend.top1_target_id"][-1]]
    expected += [arrays[f"step{i}.next_target_id"][0] for i in steps]
    _check_draft(name, loaded, None, features, tokens, expected)


def run_eagle_greedy(folder: Path) -> None:
    """The `greedy.` part of an EAGLE training case: prefill, then steps that feed on themselves."""
    outputs = load_file(folder / "outputs.safetensors")
    inputs = load_file(part_of(folder, "inputs.safetensors"))
    head = load_file(part_of(folder, "target.safetensors"))["lm_head.weight"]
    loaded = load_eagle(part_of(folder, "draft"), jnp.float32)
    net = eagle_net(loaded.drafter.config, loaded.params)
    prefill, expected = int(outputs["greedy.prefill_len"]), outputs["greedy.tokens"][0]
    features = inputs["raw0.hidden_state"].reshape(-1, head.shape[1])[:prefill]
    tokens = inputs["raw0.input_ids"].reshape(-1)[: prefill + 1]
    # Each step is fed with what the one before returned, as recorded; so all of them are one causal pass.
    hidden = outputs["greedy.hidden"][0]
    out = _run(
        net,
        np.concatenate([net.fuse(jnp.asarray(features)), net.fed_back(jnp.asarray(hidden[:-1]))]),
        np.concatenate([tokens[1:], expected[:-1]]),
        np.arange(prefill + len(expected) - 1),
    )
    hidden = out[prefill - 1 :]
    close(folder.name, "greedy.hidden", hidden[None], outputs["greedy.hidden"])
    same(folder.name, "greedy.tokens", np.argmax(hidden @ head.T, axis=1), expected)
    _check_draft(folder.name, loaded, head, features, tokens, expected)


def _no_head(hidden: Any) -> Any:
    raise AssertionError("the case's drafter has no head of its own")


def _run(net: EagleNet, states: Any, next_tokens: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """One causal pass over rows, without a cache."""
    decoder, rows = net.config.decoder, len(positions)
    pages = allocate(
        num_layers=decoder.num_layers,
        num_pages=1,
        page_size=1,
        num_kv_heads=decoder.num_kv_heads,
        head_size=decoder.head_size,
        dtype=jnp.float32,
    )

    @_JIT
    def run(states: Any, ids: Any, positions: Any) -> Any:
        sights: dict[LayerKind, Sight] = {
            kind: causal_sight(
                jnp.array([0, rows], jnp.int32),
                jnp.zeros((1, 1), jnp.int32),
                jnp.zeros((1,), jnp.int32),
                positions,
                max_queries=rows,
                window=window,
            )
            for kind, window in decoder.windows.items()
        }
        see = paged_layers(decoder, pages, sights)
        return net.step(net.embed(ids, _no_head), states, positions, see)[0]

    places = jnp.asarray(positions, jnp.int32)
    return np.asarray(run(jnp.asarray(states), jnp.asarray(next_tokens, jnp.int32), places))


def _check_draft(
    name: str,
    loaded: LoadedDrafter[Eagle],
    head: np.ndarray | None,
    features: np.ndarray,
    tokens: np.ndarray,
    expected: Any,
) -> None:
    """The drafter absorbs the features in two rounds, then drafts the expected tokens."""
    drafter, length = eagle(loaded.drafter.config, draft_length=len(expected)), len(features)
    view = _view(loaded, head, len(tokens) + len(expected))
    state, lanes = drafter.init(loaded.params, view, 1), jnp.zeros((1,), jnp.int32)
    text = Text(tokens=jnp.asarray(tokens[None], jnp.int32), lengths=jnp.array([len(tokens)], jnp.int32))
    absorb = _JIT(drafter.absorb)
    for start, end in ((0, length // 2), (length // 2, length)):
        index = jnp.arange(length, dtype=jnp.int32)
        committed = Committed(
            features=jnp.asarray(features),
            positions=index,
            path=jnp.where(index < end - start, start + index, -1)[None],
            context_lengths=jnp.array([start], jnp.int32),
            is_first=jnp.array([start == 0]),
        )
        cache = dataclasses.replace(view.cache, lengths=jnp.array([end], jnp.int32))
        view = dataclasses.replace(view, cache=cache)
        state, ready = absorb(loaded.params, view, state, lanes, text, committed)
    assert ready.tolist() == [len(expected)], f"{name}: ready {ready}"
    sampling = empty_table(1, view.target.vocab_size, 1)
    proposal = _JIT(drafter.draft)(loaded.params, view, state, lanes, text, sampling)
    same(name, "draft", proposal.tokens[0], np.asarray(expected))
    assert proposal.lengths.tolist() == [len(expected)], f"{name}: lengths {proposal.lengths}"


def _view(loaded: LoadedDrafter[Eagle], head: np.ndarray | None, max_context: int) -> TargetView:
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
