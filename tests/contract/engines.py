"""Engines over a table of 8 tokens, one per drafter, made once per test session."""

import functools

import jax.numpy as jnp
import numpy as np
from contract.drafters import Cut, Drawn, WrongRow, tiny_dflash2, tiny_domino, tiny_dspark
from contract.eagle_drafters import tiny_eagle3
from contract.tree_drafters import Branches, Confident

from jspec.decode import Method, Models
from jspec.drafters.ngram import ngram
from jspec.drafters.plain import plain
from jspec.drafters.tree_shape import dynamic_tree, static_tree
from jspec.engine import Engine
from jspec.targets.table import TableTarget

VOCABULARY = 8
M = 3


def table(seed: int = 0, scale: float = 1.5) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(VOCABULARY, VOCABULARY)).astype(np.float32) * scale


TABLE = table()
# The drafter's own table: near the target's, but not it.
DRAFT_TABLE = (TABLE + 0.7 * table(1)).astype(np.float32)

# Leaves at every depth, and a longest path through last children.
FORK = static_tree([[0], [1], [2], [0, 0], [1, 0], [1, 1], [1, 1, 0], [1, 1, 1]])

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
    "dspark": tiny_dspark(VOCABULARY, M),
    "fork": (Branches(shape=FORK), ()),
    "tree": (
        Confident(shape=dynamic_tree(width=3, depth=3, draft_length=7)),
        (jnp.asarray(DRAFT_TABLE),),
    ),
    "eagle3": tiny_eagle3(VOCABULARY, reduced=True, draft_length=M),
    "eagle3-tree": tiny_eagle3(
        VOCABULARY, reduced=False, tree=dynamic_tree(width=2, depth=3, draft_length=5)
    ),
}


# Drafters of single tests. "confident" is "dense" but for a schedule; Domino drafts as DSpark does but for
# its head and its pool; the other is a fault that has to be seen.
OTHERS = {
    "confident": (
        Drawn(draft_length=M, sparse=False),
        (jnp.asarray(DRAFT_TABLE), jnp.asarray(np.linspace(0.05, 0.95, VOCABULARY, dtype=np.float32))),
    ),
    "domino": tiny_domino(VOCABULARY, M),
    "wrong row": (
        WrongRow(config=DRAFTERS["dspark"][0].config, draft_length=M),
        DRAFTERS["dspark"][1],
    ),
}


def engine(drafter: str, target_table: np.ndarray = TABLE, **options) -> Engine:
    """A fresh engine on the table target."""
    method_drafter, params = (DRAFTERS | OTHERS)[drafter]
    if isinstance(method_drafter, Cut):
        params = (jnp.asarray(target_table),)
    if isinstance(method_drafter, Branches):
        params = (jnp.asarray(target_table), jnp.int32(FORK.depth), jnp.int32(FORK.draft_length))
    block_verification = options.pop("block_verification", False)
    return Engine(
        method=Method(
            target=TableTarget(vocab_size=VOCABULARY),
            drafter=method_drafter,
            block_verification=block_verification,
            max_log_probs=2,
        ),
        models=Models(target=(jnp.asarray(target_table),), drafter=params),
        # Tests look at an engine between rounds; test_overlap has sessions that launch ahead.
        **{**dict(max_slots=2, page_size=4, chunks=(3, 7), max_stop_ids=4, overlap=False), **options},
    )


@functools.cache
def shared(drafter: str, **options) -> Engine:
    """An engine that tests share: its compiled programs are what takes time."""
    return engine(drafter, **options)
