"""An EAGLE drafter over known text: depth 0 for all tokens, and rollouts of some of them from there."""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jspec.drafters.eagle_net import EagleNet
from jspec.objectives.batch import TrainBatch
from jspec.objectives.rollout_attention import rollout_see
from jspec.objectives.rollouts import all_places, rollout_rows, taken, visible_context
from jspec.targets.config import LayerKind
from jspec.targets.layers import See
from pallas_kernels.pytree import pytree

Embed = Callable[[Array], Array]


@pytree
class FirstPass:
    """Depth 0 of every token: what decoding holds in its cache, and the states that it continues from."""

    states: Float[Array, "rows tokens hidden"]
    k: Float[Array, "layers rows tokens kv_heads head_size"]
    v: Float[Array, "layers rows tokens kv_heads head_size"]


def first_pass(
    net: EagleNet,
    target_embed: Embed,
    batch: TrainBatch,
    features: Array,
    ahead: int | Int[Array, ""] = 0,
) -> FirstPass:
    """Depth 0: confirmed features, causal within each document.

    Args:
      net: the drafter.
      target_embed: the target's input embedding.
      batch: tokens and documents; its features are not read.
      features: [rows, tokens, width], those that the drafter reads.
      ahead: a row sees so many rows more than decoding would show it: what a leak would do.
    """
    rows, tokens = batch.ids.shape
    places = all_places(batch)
    row = rollout_rows(batch, places, 0)
    decoder = net.config.decoder
    visible = {
        kind: visible_context(batch, places, 0, window, ahead) for kind, window in decoder.windows.items()
    }
    states, k, v = net.step(
        net.embed(row.ids.reshape(-1), target_embed),
        net.fuse(features.reshape(rows * tokens, -1)),
        row.positions.reshape(-1),
        lambda index: rollout_see(decoder, None, None, visible[decoder.layer_kinds[index]]),
    )
    k, v = (x.reshape(x.shape[0], rows, tokens, *x.shape[2:]) for x in (k, v))
    return FirstPass(states=states.reshape(rows, tokens, -1), k=k, v=v)


def rollouts(
    net: EagleNet,
    target_embed: Embed,
    batch: TrainBatch,
    first: FirstPass,
    places: Int[Array, "rows places"],
    depths: int,
    path: Int[Array, "rows places later"] | None = None,
    ahead: int | Int[Array, ""] = 0,
) -> Sequence[Float[Array, "rows places hidden"]]:
    """States of rows `places` at depths 0 to depths - 1, each fed its own state of the depth before.

    Gradients flow through all depths, keys and values included.

    Args:
      net: the drafter.
      target_embed: the target's input embedding.
      batch: tokens and documents.
      first: depth 0.
      places: the rows to roll out.
      depths: how many, depth 0 counted.
      path: tokens that are read at depths 1, 2, ...; None = the text's, as in training.
      ahead: see `first_pass`.
    """
    shape = (*places.shape, -1)
    decoder = net.config.decoder
    states = [taken(first.states, places)]
    own_k: list[Array] = []  # per depth: [layers, rows, places, kv_heads, head_size]
    own_v: list[Array] = []
    for depth in range(1, depths):
        row = rollout_rows(batch, places, depth)
        visible: dict[LayerKind, Array] = {
            kind: visible_context(batch, places, depth, window, ahead)
            for kind, window in decoder.windows.items()
        }

        def see(index: int, visible: dict[LayerKind, Array] = visible) -> See:
            kind = decoder.layer_kinds[index]
            window = decoder.windows[kind]
            seen = 0 if window is None else max(len(own_k) - (window - 1), 0)
            k_own = jnp.stack([k[index] for k in own_k[seen:]], axis=2) if own_k[seen:] else None
            v_own = jnp.stack([v[index] for v in own_v[seen:]], axis=2) if own_v[seen:] else None
            return rollout_see(decoder, first.k[index], first.v[index], visible[kind], k_own, v_own)

        ids = row.ids if path is None else path[:, :, depth - 1]
        flat = states[-1].reshape(-1, states[-1].shape[2])
        new, k, v = net.step(
            net.embed(ids.reshape(-1), target_embed), net.fed_back(flat), row.positions.reshape(-1), see
        )
        states.append(new.reshape(shape))
        own_k.append(k.reshape(k.shape[0], *places.shape, *k.shape[2:]))
        own_v.append(v.reshape(v.shape[0], *places.shape, *v.shape[2:]))
    return states
