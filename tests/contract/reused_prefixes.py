"""Engines over a tiny decoder, one per drafter, and what they hold of a text."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from tiny_decoder import FLOAT32, decoder, weights

from jspec.decode import Method, Models
from jspec.drafters.dflash import dflash, dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.dspark import dspark
from jspec.drafters.dspark_heads import Confidence, Markov
from jspec.drafters.eagle import eagle
from jspec.drafters.eagle_init import eagle_config_for
from jspec.drafters.eagle_net import eagle_leaves
from jspec.drafters.ngram import ngram
from jspec.drafters.plain import plain
from jspec.drafters.tree_shape import dynamic_tree
from jspec.engine import Engine
from jspec.results import Piece
from jspec.session import Session
from jspec.settings import Settings
from jspec.targets.decoder import DecoderTarget, decoder_leaves
from pallas_kernels.attention.pages import gather_rows

VOCABULARY, PAGE, CONTEXT = 5, 4, 48  # ids so few that even an untrained drafter is often right

TARGET = DecoderTarget(decoder("qwen3", ("full", "full"), VOCABULARY))
WINDOWED = DecoderTarget(decoder("qwen3", ("full", "window"), VOCABULARY))
BLOCK = dict(mask_token_id=4, target_layer_ids=(1, -1), num_target_layers=2, target_hidden_size=8)


def _drafter(name: str):
    if name == "plain":
        return plain(), ()
    if name == "ngram":
        return ngram(draft_length=3, min_n=1, max_n=3), ()
    if name == "dflash":
        config = DFlashConfig(decoder=decoder("dflash", ("full",), VOCABULARY), block_size=4, **BLOCK)
        return dflash(config), weights(dflash_leaves(config, FLOAT32), 1)
    if name == "dspark":
        config = DFlashConfig(
            decoder=decoder("dflash", ("full",), VOCABULARY),
            block_size=3,
            anchor_predicts=True,
            head=Markov(rank=3, kind="rnn"),
            confidence=Confidence(reads_token=True),
            **BLOCK,
        )
        return dspark(config), weights(dflash_leaves(config, FLOAT32), 2)
    config = eagle_config_for(TARGET.config, kind="eagle3", target_layer_ids=[-1, 1], own_head=True)
    tree = dynamic_tree(width=2, depth=2, draft_length=3) if name == "eagle3-tree" else None
    drafter = eagle(config, draft_length=None if tree else 3, tree=tree)
    return drafter, weights(eagle_leaves(config, FLOAT32), 3)


NAMES = ("plain", "ngram", "dflash", "dspark", "eagle3", "eagle3-tree")


@functools.cache
def shared(name: str, target: DecoderTarget = TARGET, **options) -> Engine:
    """An engine that tests share; they empty its prefix cache first."""
    drafter, params = _drafter(name)
    return Engine(
        method=Method(target=target, drafter=drafter),
        models=Models(target=weights(decoder_leaves(target.config, FLOAT32), 0), drafter=params),
        **{**dict(max_slots=2, max_context=CONTEXT, page_size=PAGE, chunks=(3, 7), overlap=False), **options},
    )


def alone(prompt: tuple[int, ...], settings: Settings, target: DecoderTarget = TARGET) -> tuple[int, ...]:
    """The text that plain decoding gives, which shares nothing."""
    key = prompt, repr(settings), target
    if key not in _ALONE:
        engine = shared("plain", target, prefix_cache=False)
        _ALONE[key] = engine.generate([prompt], settings)[0].token_ids
    return _ALONE[key]


_ALONE: dict[tuple, tuple[int, ...]] = {}


def held(engine: Engine, slot: int) -> dict[str, np.ndarray]:
    """Everything that target and drafter hold of a slot's text."""
    state = engine._runner.state
    length = int(state.cache.lengths[slot])
    pools = {f"group {i}": group.pages for i, group in enumerate(state.cache.groups)}
    rows = {"length": np.asarray(length), "tokens": np.asarray(state.slots.text.tokens[slot, : length + 1])}
    for field in ("output_counts", "prompt_seen"):
        rows[field] = np.asarray(getattr(state.slots.history, field)[slot])
    if hasattr(state.drafter, "pages"):
        pools["drafter"] = state.drafter.pages
    table = state.cache.groups[0].page_table[slot][None]
    for name, pages in pools.items():
        for layer in range(pages.stored_k.shape[0]):
            for side, array in zip("kv", gather_rows(pages, layer, table, length), strict=True):
                rows[f"{name}, layer {layer}, {side}"] = np.asarray(array[0])
    for field in ("states", "ids", "probs", "found", "text_lengths", "required"):
        if hasattr(state.drafter, field):
            leaves = jax.tree.leaves(getattr(state.drafter, field))
            rows |= {f"{field} {i}": np.asarray(leaf[slot]) for i, leaf in enumerate(leaves)}
    return rows


def tree_pages(engine: Engine) -> list[int]:
    """Pages of the prefix cache in group 0."""
    found = [engine._prefixes._root]
    for shared in found:
        found.extend(shared.children.values())
    return [shared.pages[0] for shared in found[1:]]


def only_text(engine: Engine) -> tuple[int, ...]:
    """Tokens of the prefix cache's pages, which are of one text, and the next one, which keys hold, too."""
    spelled, page = [], engine._prefixes._root
    while page.children:
        (page,) = page.children.values()
        spelled.extend(page.key[:-1])
    return (*spelled, *page.key[-1:])


def pieces_of_an_interrupted_one(session: Session, *, every: int = 1) -> list[Piece]:
    """Runs a session to its end, and takes the slot of request 0 whenever it has emitted so many tokens."""
    pieces, seen = [], 0
    while session.busy:
        pieces += session.step()
        new = sum(len(p.token_ids) for p in pieces if p.index == 0)
        if new >= seen + every and any(r.index == 0 for r in session._running.values()):
            session.preempt(0)
            seen = new
    return pieces


def spoil(engine: Engine, keep: list[int]) -> None:
    """Fills every page but some with NaN, of target and drafter; the engine must be idle."""
    gone = np.setdiff1d(np.arange(engine._pool.num_pages[0]), keep)

    def poisoned(leaf: jax.Array) -> jax.Array:
        if leaf.ndim == 5 and leaf.dtype == FLOAT32:
            return leaf.at[:, gone].set(jnp.nan)
        return leaf

    engine._runner.state = jax.tree.map(poisoned, engine._runner.state)
