"""Known texts as a cache that decoding drafts from: every anchor is a lane over one shared context."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.cache import Cache, Group, new_cache
from jspec.drafters.protocol import Committed, Text
from jspec.net import Params
from jspec.targets.target import Target
from jspec.targets.view import TargetView

_PAGE_SIZE = 32


def shared_context(
    target: Target, target_params: Params, ids: Int[Array, "tokens"], anchors: Int[Array, "anchors"]
) -> tuple[TargetView, Text]:
    """A slot per anchor, whose pages are everybody's; its context ends in front of its anchor."""
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
    return view, Text(tokens=jnp.broadcast_to(ids, (count, tokens)), lengths=anchors + 1)


def whole_text(features: Float[Array, "tokens width"]) -> Committed:
    """All tokens of a text, committed at once by one lane.

    Those behind an anchor are in the pages, too: that they stay unseen is a part of what is compared.
    """
    index = jnp.arange(features.shape[0], dtype=jnp.int32)
    return Committed(
        features=features,
        positions=index,
        path=index[None],
        context_lengths=jnp.zeros((1,), jnp.int32),
        is_first=jnp.ones((1,), bool),
    )
