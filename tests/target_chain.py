"""Runs one text through a target: in pieces, each committed before the next one."""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.cache import Cache, Group, commit, new_cache
from jspec.net import Params
from jspec.round import Nodes
from jspec.targets.decoder import DecoderTarget


@dataclasses.dataclass
class Run:
    """What the target made of the text so far, all arrays [tokens, ...]."""

    hidden: np.ndarray
    features: np.ndarray
    logits: np.ndarray
    cache: Cache


def empty_cache(target: DecoderTarget, capacity: int, *, page_size: int = 8, dtype=jnp.float32) -> Cache:
    """A cache of one slot that owns all of its pages; page 0 belongs to nobody."""
    columns = -(-capacity // page_size)
    cache = new_cache(
        target.groups,
        max_slots=1,
        num_pages=(columns + 1,) * len(target.groups),
        page_size=page_size,
        max_context=columns * page_size,
        dtype=jnp.dtype(dtype),
    )
    table = 1 + jnp.arange(columns, dtype=jnp.int32)[None]
    return Cache(
        groups=tuple(Group(pages=g.pages, page_table=table) for g in cache.groups), lengths=cache.lengths
    )


# Tiny models: compiling takes far longer than running.
@functools.partial(
    jax.jit, static_argnames=("target", "capture"), compiler_options={"xla_backend_optimization_level": 0}
)
def step(target: DecoderTarget, params: Params, cache: Cache, ids: jax.Array, capture: tuple[str, ...]):
    """Executes `ids` as one chain of slot 0 and commits all of them."""
    count = ids.shape[0]
    index = jnp.arange(count, dtype=jnp.int32)
    nodes = Nodes(
        tokens=ids,
        positions=cache.lengths[0] + index,
        offsets=jnp.array([0, count], jnp.int32),
        certain_lengths=jnp.array([count], jnp.int32),
    )
    lanes = jnp.zeros((1,), jnp.int32)
    out = target.forward(params, nodes, cache, lanes, capture, count)
    return (
        out.hidden,
        out.features,
        target.logits(params, out.hidden),
        commit(cache, out.pending, index[None], lanes),
    )


def run_chain(
    target: DecoderTarget,
    params: Params,
    ids: Sequence[int],
    pieces: Sequence[int] | None = None,
    capture: tuple[str, ...] = (),
    dtype=jnp.float32,
    capacity: int | None = None,
) -> Run:
    """Runs `ids`, cut into `pieces` tokens (None = all at once)."""
    pieces = [len(ids)] if pieces is None else pieces
    assert sum(pieces) == len(ids)
    cache, start = empty_cache(target, capacity or len(ids), dtype=dtype), 0
    rows: list[tuple[np.ndarray, ...]] = []
    for count in pieces:
        piece = jnp.asarray(ids[start : start + count], jnp.int32)
        *row, cache = step(target, params, cache, piece, capture)
        rows.append(tuple(np.asarray(array, np.float32) for array in row))
        start += count
    hidden, features, logits = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return Run(hidden=hidden, features=features, logits=logits, cache=cache)


def continue_greedily(
    target: DecoderTarget, params: Params, run: Run, new_tokens: int, capture: tuple[str, ...] = ()
) -> list[int]:
    """Greedy tokens after a run, one by one; its cache needs room for them."""
    new, cache = [int(run.logits[-1].argmax())], run.cache
    while len(new) < new_tokens:
        _, _, logits, cache = step(target, params, cache, jnp.array(new[-1:], jnp.int32), capture)
        new.append(int(jnp.argmax(logits[-1])))
    return new
