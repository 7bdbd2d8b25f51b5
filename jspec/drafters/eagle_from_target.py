"""EAGLE weights that begin with the target's: fewer updates until drafts are accepted."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from jspec.drafters.eagle_net import EagleConfig, eagle_leaves
from jspec.net import Params
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import decoder_leaves

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_size",
    "qkv_bias",
    "mlp_bias",
)


def eagle_from_target(
    config: EagleConfig,
    params: Params,
    target: DecoderConfig,
    target_params: Params,
    head: Float[Array, "hidden draft_vocabulary"] | None = None,
) -> Params:
    """Fresh weights with as much of the target in them as fits.

    Drafter layer i of n begins as the target's layer i of its last n. EAGLE-3's fc begins as the last captured
    state alone, its final norm and head as the target's; a wide layer takes the target's weights for its
    state, and keeps fresh ones for the embedding beside it. EAGLE's fc begins as the feature alone.

    Args:
      config: of the drafter.
      params: from `jspec.drafters.eagle_init.init_eagle_params`.
      target: must have the drafter's sizes.
      target_params: its leaves.
      head: the target's columns of the drafted ids, for a drafter with a head of its own.

    Raises:
      ValueError: naming a size that differs.
    """
    own = config.decoder
    for name in _SIZES:
        if getattr(own, name) != getattr(target, name):
            raise ValueError(
                f"{name}: expected the target's {getattr(target, name)}, got {getattr(own, name)}; a drafter that "
                "begins with the target's layers has their sizes: change it, or start fresh"
            )
    if own.num_layers > target.num_layers:
        raise ValueError(
            f"num_layers: expected at most the target's {target.num_layers}, got {own.num_layers}"
        )
    leaves = decoder_leaves(target, jnp.dtype(jnp.float32))
    theirs = dict(zip((leaf.path for leaf in leaves), target_params, strict=True))
    hidden, eagle3 = own.hidden_size, config.kind == "eagle3"
    # fc reads [states] or [embedding, state]; the last block of it is what the layers are to see.
    rows = config.features_size if eagle3 else 2 * hidden
    taken: dict[str, Array] = {"fc": jnp.eye(rows, hidden, k=hidden - rows)}
    if eagle3:
        taken["norm"] = theirs["norm"]
    if head is not None:
        taken["head"] = head
    for index in range(own.num_layers):
        prefix = f"layers.{target.num_layers - own.num_layers + index}."
        for path, value in theirs.items():
            if path.startswith(prefix):
                taken[f"layers.{index}.{path.removeprefix(prefix)}"] = value
        taken[f"layers.{index}.state_norm"] = theirs[f"{prefix}attention_norm"]
    return tuple(
        _placed(value, taken.get(leaf.path))
        for leaf, value in zip(eagle_leaves(config, jnp.dtype(jnp.float32)), params, strict=True)
    )


def _placed(fresh: Array, taken: Array | None) -> Array:
    """`taken`, or its place at the end of a wider input; the fresh value where there is nothing to take."""
    if taken is None:
        return fresh
    if taken.shape == fresh.shape:
        return jnp.array(taken, fresh.dtype)
    return fresh.at[fresh.shape[0] - taken.shape[0] :].set(taken.astype(fresh.dtype))
