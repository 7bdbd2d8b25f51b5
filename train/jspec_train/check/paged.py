"""What the decoding code drafts at places of a known text: every anchor is a lane over one shared context."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jspec.cache import Cache, Group, new_cache
from jspec.drafters.dflash import DFlash
from jspec.drafters.protocol import Committed, Text
from jspec.net import Params
from jspec.sampling import empty_table
from jspec.targets.target import Target
from jspec.targets.view import TargetView
from jspec_train.check.texts import Texts

_PAGE_SIZE = 32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafted:
    """Of every text and anchor; places without an anchor hold anything."""

    hidden: np.ndarray  # float32 [texts, anchors, block, hidden]
    tokens: np.ndarray  # int32 [texts, anchors, drafts]; -1 past the proposal's length


def drafted(drafter: DFlash, params: Params, target: Target, target_params: Params, texts: Texts) -> Drafted:
    """Absorbs each text's features into pages, and drafts greedily at each anchor.

    All features of the text are in the pages, those behind the anchor as well: that they stay unseen is a
    part of what is compared.
    """
    rows = [
        _one_text(
            drafter,
            target,
            params,
            target_params,
            texts.batch.ids[row],
            texts.batch.features[row],
            texts.blocks.anchors[row],
        )
        for row in range(len(texts.samples))
    ]
    hidden, tokens = zip(*rows, strict=True)
    return Drafted(hidden=np.stack(hidden), tokens=np.stack(tokens))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _one_text(
    drafter: DFlash,
    target: Target,
    params: Params,
    target_params: Params,
    ids: Int[Array, "tokens"],
    features: Float[Array, "tokens width"],
    anchors: Int[Array, "anchors"],
) -> tuple[Float[Array, "anchors block hidden"], Int[Array, "anchors drafts"]]:
    count, tokens = anchors.shape[0], ids.shape[0]
    columns = -(-tokens // _PAGE_SIZE)
    cache = new_cache(
        target.groups,
        max_slots=count,
        num_pages=(columns,) * len(target.groups),
        page_size=_PAGE_SIZE,
        max_context=columns * _PAGE_SIZE,
        dtype=jnp.dtype(jnp.float32),
    )
    table = jnp.broadcast_to(jnp.arange(columns, dtype=jnp.int32), (count, columns))
    groups = tuple(Group(pages=group.pages, page_table=table) for group in cache.groups)
    view = TargetView(params=target_params, cache=Cache(groups=groups, lengths=anchors), target=target)
    text = Text(tokens=jnp.broadcast_to(ids, (count, tokens)), lengths=anchors + 1)
    index = jnp.arange(tokens, dtype=jnp.int32)
    committed = Committed(
        features=features,
        positions=index,
        path=index[None],
        context_lengths=jnp.zeros((1,), jnp.int32),
        is_first=jnp.ones((1,), bool),
    )
    state = drafter.init(params, view, count)
    state, _ = drafter.absorb(params, view, state, jnp.zeros((1,), jnp.int32), text, committed)
    lanes = jnp.arange(count, dtype=jnp.int32)
    hidden = drafter.block_hidden(params, view, state, lanes, text)
    proposal = drafter.draft(params, view, state, lanes, text, empty_table(count, target.vocab_size, 1))
    within = jax.lax.broadcasted_iota(jnp.int32, proposal.tokens.shape, 1)
    return hidden, jnp.where(within < proposal.lengths[:, None], proposal.tokens, -1)
