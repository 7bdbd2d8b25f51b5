"""Engines over a table of 8 tokens, one per drafter, made once per test session."""

import functools

import jax.numpy as jnp
import numpy as np
from contract.drafters import Cut, Drawn, tiny_dflash2

from jspec.decode import Method, Models
from jspec.drafters.ngram import ngram
from jspec.drafters.plain import plain
from jspec.engine import Engine
from jspec.targets.table import TableTarget

VOCABULARY = 8
M = 3


def table(seed: int = 0, scale: float = 1.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32) * scale


TABLE = table()
# The drafter's own table: near the target's, but not it.
DRAFT_TABLE = (TABLE + 0.7 * table(1)).astype(np.float32)

DRAFTERS = {
    "plain": (plain(), ()),
    "ngram": (ngram(draft_length=M, min_n=1, max_n=3), ()),
    "anti": (Cut(draft_length=M, right=0), ()),
    "cut1": (Cut(draft_length=M, right=1), ()),
    "cut2": (Cut(draft_length=M, right=2), ()),
    "oracle": (Cut(draft_length=M, right=M), ()),
    "dense": (Drawn(draft_length=M, sparse=False), (jnp.asarray(DRAFT_TABLE),)),
    "sparse": (Drawn(draft_length=M, sparse=True), (jnp.asarray(DRAFT_TABLE),)),
    "varying": (Drawn(draft_length=M, sparse=False, varying=True), (jnp.asarray(DRAFT_TABLE),)),
    "dflash2": tiny_dflash2(VOCABULARY, M),
}

# Apart from the others, because without a schedule it is "dense".
WITH_CONFIDENCE = {
    "confident": (
        Drawn(draft_length=M, sparse=False),
        (jnp.asarray(DRAFT_TABLE), jnp.asarray(np.linspace(0.05, 0.95, VOCABULARY, dtype=np.float32))),
    ),
}


def engine(drafter: str, target_table: np.ndarray = TABLE, **options) -> Engine:
    """A fresh engine on the table target."""
    method_drafter, params = (DRAFTERS | WITH_CONFIDENCE)[drafter]
    if isinstance(method_drafter, Cut):
        params = (jnp.asarray(target_table),)
    block_verification = options.pop("block_verification", False)
    return Engine(
        method=Method(
            target=TableTarget(vocab_size=VOCABULARY),
            drafter=method_drafter,
            block_verification=block_verification,
            max_log_probs=2,
        ),
        models=Models(target=(jnp.asarray(target_table),), drafter=params),
        **{**dict(max_slots=2, page_size=4, chunks=(3, 7), max_stop_ids=4), **options},
    )


@functools.cache
def shared(drafter: str, **options) -> Engine:
    """An engine that tests share: its compiled programs are what takes time."""
    return engine(drafter, **options)
