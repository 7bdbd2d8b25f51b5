"""Golden cases of the DFlash draft: context rows, block, logits and greedy tokens."""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from jspec.cache import Cache, GroupLayout, new_cache
from jspec.checkpoints.dflash import dflash_from_tensors
from jspec.checkpoints.dflash_config import ARCHITECTURE
from jspec.checkpoints.loaded_drafter import LoadedDrafter
from jspec.drafters.dflash import dflash_net
from jspec.drafters.dflash_net import DFlashNet
from jspec.drafters.protocol import Committed, Text
from jspec.round import Proposal
from jspec.sampling import empty_table
from jspec.targets.view import TargetView
from pallas_kernels.attention.pages import Pages, gather_rows

TOLERANCE = 1e-4
PAGE_SIZE = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """A target of which only the embedding and the head are known: params are (embedding, head)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    max_context: int

    @property
    def identity(self) -> str:
        """How refusals name it."""
        return f"recorded, {self.num_layers} layers, hidden {self.hidden_size}, vocabulary {self.vocab_size}"

    @property
    def groups(self) -> tuple[GroupLayout, ...]:
        """Pages to follow."""
        return (GroupLayout(num_layers=0, num_kv_heads=1, head_size=1),)

    def forward(self, params: Any, *arguments: Any, **options: Any) -> Any:
        """The features are recorded as well."""
        raise NotImplementedError

    def embed(self, params: Any, ids: Any) -> Any:
        """Rows of the recorded table."""
        return params[0][ids]

    def logits(self, params: Any, hidden: Any) -> Any:
        """The recorded head."""
        return hidden @ params[1].T


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """The `w.` arrays of a case, as an open checkpoint."""

    where: str
    arrays: Mapping[str, np.ndarray]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor."""
        return {name: array.shape for name, array in self.arrays.items()}

    def check_type(self, name: str, *, integer: bool = False) -> None:
        """Every array is what it should be."""

    def read(self, name: str) -> np.ndarray:
        """The tensor."""
        return self.arrays[name]


def dflash_names(folder: Path) -> list[str]:
    """Cases in `f_configs.json` that are plain DFlash drafters, without the `f_` of their files."""
    configs = json.loads((folder / "f_configs.json").read_text())
    return [name for name, values in configs.items() if values["architectures"] == [ARCHITECTURE]]


def run_dflash(folder: Path) -> None:
    """Every `f_*` case of a plain DFlash drafter."""
    names = dflash_names(folder)
    assert names, "f_configs.json: no DFlash drafter in the file"
    for name in names:
        run_dflash_case(folder, name)


def run_dflash_case(folder: Path, name: str) -> None:
    """Absorbs the recorded features and drafts, and compares everything on the way."""
    values = json.loads((folder / "f_configs.json").read_text())[name]
    arrays = load_file(folder / f"f_{name}.safetensors")
    ready = absorbed(name, values, weights_of(arrays), arrays)
    compare_drafts(name, ready, arrays)
    same(name, "draft_tokens_greedy", ready.proposal.tokens, arrays["draft_tokens_greedy"])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """A drafter that has absorbed the recorded contexts, and what it drafts greedily."""

    loaded: LoadedDrafter
    context_lengths: np.ndarray
    hidden: jax.Array  # of whole blocks
    row_hidden: jax.Array  # of the rows that draft
    logits: jax.Array
    proposal: Proposal


def weights_of(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The arrays of a case that are its weights."""
    return {key.removeprefix("w."): array for key, array in arrays.items() if key.startswith("w.")}


def absorbed(
    name: str,
    values: Mapping[str, Any],
    weights: Mapping[str, np.ndarray],
    arrays: Mapping[str, np.ndarray],
) -> Ready:
    """Loads a drafter and absorbs the contexts of `arrays`, comparing the rows that it records.

    Args:
      name: of the case.
      values: its config.json.
      weights: its tensors.
      arrays: in.anchors, in.ctx_lens, in.target_features, in.target_embed, in.target_lm_head, and what
        may be compared.
    """
    loaded = dflash_from_tensors(values, Weights(where=f"{name} weights", arrays=weights), jnp.float32)
    context_lengths = arrays["in.ctx_lens"].astype(np.int32)
    view, lanes = _view(loaded, arrays, context_lengths), jnp.arange(len(context_lengths), dtype=jnp.int32)
    text = _text(arrays["in.anchors"], context_lengths)
    net = dflash_net(loaded.drafter.config, loaded.params)
    state = loaded.drafter.init(loaded.params, view, len(context_lengths))
    committed = _committed(arrays["in.target_features"], context_lengths)
    _compare_context(name, net, arrays, committed, context_lengths)
    drafter = loaded.drafter
    state, ready = jax.jit(drafter.absorb)(loaded.params, view, state, lanes, text, committed)
    _compare_rows(name, state.pages, view.cache, arrays, context_lengths)
    drafts = [drafter.draft_length] * len(context_lengths)
    assert np.asarray(ready).tolist() == drafts, f"{name}: ready {ready}"
    sampling = empty_table(len(context_lengths), view.target.vocab_size, 1)

    def drafted(*arguments: Any) -> tuple[Any, ...]:
        return (
            drafter.block_hidden(*arguments),
            drafter.draft_rows(*arguments),
            drafter.draft(*arguments, sampling),
        )

    hidden, (row_hidden, logits), proposal = jax.jit(drafted)(loaded.params, view, state, lanes, text)
    assert np.asarray(proposal.lengths).tolist() == drafts, f"{name}: lengths {proposal.lengths}"
    return Ready(
        loaded=loaded,
        context_lengths=context_lengths,
        hidden=hidden,
        row_hidden=row_hidden,
        logits=logits,
        proposal=proposal,
    )


def compare_drafts(name: str, ready: Ready, arrays: Mapping[str, np.ndarray]) -> None:
    """Compares the block's ids, hidden states and logits."""
    config = ready.loaded.drafter.config
    mask_ids = np.full((len(ready.context_lengths), config.block_size - 1), config.mask_token_id)
    block_ids = np.concatenate([arrays["in.anchors"][:, None], mask_ids], axis=1)
    assert np.array_equal(arrays["block_ids"], block_ids), f"{name}: block_ids are not anchor and masks"
    close(name, "hidden", ready.hidden.reshape(-1, ready.hidden.shape[2]), arrays["hidden"])
    if "draft_logits" in arrays:
        # Recorded at the head, before the drafter's own transform if it has one.
        head = jnp.asarray(ready.row_hidden) @ arrays["in.target_lm_head"].T
        close(name, "draft_logits", head, arrays["draft_logits"])


def _view(loaded: LoadedDrafter, arrays: Mapping[str, np.ndarray], context_lengths: np.ndarray) -> TargetView:
    config = loaded.drafter.config
    vocabulary, hidden = arrays["in.target_embed"].shape
    layers = config.num_target_layers or max(config.target_layer_ids) + 1
    target = Recorded(
        vocab_size=vocabulary,
        hidden_size=hidden,
        num_layers=layers,
        max_context=int(context_lengths.max()) + config.block_size,
    )
    columns = -(-target.max_context // PAGE_SIZE)
    slots = len(context_lengths)
    cache = new_cache(
        target.groups,
        max_slots=slots,
        num_pages=(slots * columns,),
        page_size=PAGE_SIZE,
        max_context=target.max_context,
        dtype=jnp.dtype(jnp.float32),
    )
    # Pages in descending order: nobody may count on neighbours.
    table = jnp.arange(slots * columns, dtype=jnp.int32)[::-1].reshape(slots, columns)
    group = dataclasses.replace(cache.groups[0], page_table=table)
    cache = Cache(groups=(group,), lengths=jnp.asarray(context_lengths))
    params = (jnp.asarray(arrays["in.target_embed"]), jnp.asarray(arrays["in.target_lm_head"]))
    return TargetView(params=params, cache=cache, target=target)


def _text(anchors: np.ndarray, context_lengths: np.ndarray) -> Text:
    tokens = np.zeros((len(anchors), int(context_lengths.max()) + 1), np.int32)
    tokens[np.arange(len(anchors)), context_lengths] = anchors
    return Text(tokens=jnp.asarray(tokens), lengths=jnp.asarray(context_lengths + 1))


def _committed(features: np.ndarray, context_lengths: np.ndarray) -> Committed:
    """All context tokens in one round; rows past a request's context are the rejected ones."""
    requests, width, size = features.shape
    within = np.arange(width, dtype=np.int32)[None]
    real = within < context_lengths[:, None]
    nodes = np.arange(requests * width, dtype=np.int32).reshape(requests, width)
    return Committed(
        features=jnp.asarray(np.where(real[:, :, None], features, np.nan).reshape(-1, size)),
        positions=jnp.asarray(np.tile(within, (requests, 1)).reshape(-1)),
        path=jnp.asarray(np.where(real, nodes, -1)),
        context_lengths=jnp.zeros((requests,), jnp.int32),
        is_first=jnp.ones((requests,), bool),
    )


def _compare_context(
    name: str,
    net: DFlashNet,
    arrays: Mapping[str, np.ndarray],
    committed: Committed,
    context_lengths: np.ndarray,
) -> None:
    width = arrays["in.target_features"].shape[1]
    context = np.asarray(net.project_context(committed.features)).reshape(len(context_lengths), width, -1)
    for request, length in enumerate(context_lengths):
        if f"projected_ctx.{request}" in arrays:
            key = f"projected_ctx.{request}"
            close(name, key, context[request, :length], arrays[key])


def _compare_rows(
    name: str, state: Pages, cache: Cache, arrays: Mapping[str, np.ndarray], context_lengths: np.ndarray
) -> None:
    table = cache.groups[0].page_table
    layers = sorted({int(key.split(".")[1]) for key in arrays if key.startswith("ctx_k.")})
    if not layers:
        return
    assert layers == list(range(state.k.shape[0])), f"{name}: expected context of layers {layers}"
    for layer in layers:
        k, v = gather_rows(state, layer, table, int(context_lengths.max()))
        for request, length in enumerate(context_lengths):
            for kind, rows in (("ctx_k", k), ("ctx_v", v)):
                key = f"{kind}.{layer}.{request}"
                close(name, key, rows[request, :length], arrays[key])


def close(name: str, key: str, actual: Any, expected: np.ndarray) -> None:
    """Compares an array of the case by the tolerance of its kind."""
    actual = np.asarray(actual)
    assert actual.shape == expected.shape, (
        f"{name}: {key}: expected shape {expected.shape}, got {actual.shape}"
    )
    difference = float(np.max(np.abs(actual - expected), initial=0.0))
    assert difference <= TOLERANCE, f"{name}: {key}: differs by {difference:.2e}"


def same(name: str, key: str, actual: Any, expected: np.ndarray) -> None:
    """Compares ids."""
    actual = np.asarray(actual)
    assert np.array_equal(actual, expected), (
        f"{name}: {key}: expected {expected.tolist()}, got {actual.tolist()}"
    )
