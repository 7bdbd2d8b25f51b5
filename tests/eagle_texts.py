"""Tiny EAGLE drafters for the tiny target of `training_data`, and a row of two packed documents."""

import jax.numpy as jnp
import numpy as np
from training_data import HIDDEN, VOCABULARY, random_params, target_config, tiny_target

from jspec.drafters.eagle_init import eagle_config_for
from jspec.drafters.eagle_net import EagleConfig, eagle_leaves
from jspec.net import Params
from jspec.objectives.batch import TrainBatch
from jspec.objectives.frozen import Tables, draft_tables

FIRST, SECOND, PADDING = 7, 6, 2  # tokens of the documents
IDS = tuple(range(3, 3 + 2 * 12, 2))  # drafted, 12 of 32


def drafter(kind: str = "eagle3", *, reduced: bool = True, **options) -> tuple[EagleConfig, Params]:
    """A drafter with large random weights."""
    eagle3 = kind == "eagle3"
    config = eagle_config_for(
        target_config(),
        kind=kind,
        target_layer_ids=(0, 2, 4) if eagle3 else None,
        draft_vocab_size=len(IDS) if eagle3 and reduced else None,
        own_head=eagle3,
        **options,
    )
    leaves = eagle_leaves(config, jnp.dtype(jnp.float32))
    params = tuple(
        jnp.asarray(IDS, jnp.int32) if leaf.path == "draft_ids" else value
        for leaf, value in zip(leaves, random_params(leaves, 5), strict=True)
    )
    return config, params


def tables(config: EagleConfig) -> Tables:
    """The target's, reduced if the drafter is."""
    if config.draft_vocab_size is None:
        return tiny_target()
    return draft_tables(tiny_target(), HIDDEN, jnp.asarray(IDS, jnp.int32), VOCABULARY)


def packed(width: int, *, seed: int = 0) -> TrainBatch:
    """One row: a document of 7 tokens, one of 6, two of padding. The first two tokens of each are a prompt."""
    lengths = (FIRST, SECOND)
    tokens = sum(lengths) + PADDING
    rng = np.random.default_rng(seed)
    segments = np.repeat([1, 2, 0], [*lengths, PADDING])
    positions = np.concatenate([np.arange(n) for n in (*lengths, PADDING)])
    features = rng.standard_normal((tokens, width), np.float32)
    return TrainBatch(
        # All different, so that a token can be told from its id.
        ids=jnp.asarray(np.arange(1, tokens + 1)[None], jnp.int32),
        loss_mask=jnp.asarray(((positions >= 2) & (segments > 0))[None]),
        segments=jnp.asarray(segments[None], jnp.int32),
        positions=jnp.asarray((positions * (segments > 0))[None], jnp.int32),
        features=jnp.asarray((features * (segments > 0)[:, None])[None]),
    )


def floating(params: Params) -> tuple[Params, object]:
    """Params that can be trained, and a function that puts them back among the others."""
    kinds = [jnp.issubdtype(p.dtype, jnp.floating) for p in params]

    def join(given: Params) -> Params:
        rest = iter(given)
        return tuple(next(rest) if kind else p for p, kind in zip(params, kinds, strict=True))

    return tuple(p for p, kind in zip(params, kinds, strict=True) if kind), join
