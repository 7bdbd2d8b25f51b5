"""A target and drafters of random weights whose eight heads, two KV heads and vocabulary a mesh can split."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.decode import Method, Models
from jspec.drafters.dflash import dflash, dflash_leaves
from jspec.drafters.dflash_init import dflash_config_for
from jspec.drafters.eagle import eagle
from jspec.drafters.eagle_init import eagle_config_for
from jspec.drafters.eagle_net import eagle_leaves
from jspec.drafters.tree_shape import dynamic_tree
from jspec.engine import Engine
from jspec.net import Leaf
from jspec.sharding import leaf_sharding, make_mesh
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves, decoder_units, with_kv_copies
from jspec.targets.rope import Rope

FLOAT32 = jnp.dtype(jnp.float32)
VOCABULARY = 16
MadeDrafter = tuple[Any, tuple[Leaf, ...], DecoderConfig]


def target_config(mesh: jax.sharding.Mesh | None = None) -> DecoderConfig:
    config = DecoderConfig(
        architecture="llama",
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_layers=2,
        num_heads=8,
        num_kv_heads=2,
        head_size=4,
        norm_eps=1e-5,
        max_context=64,
        full_rope=Rope(theta=1000.0),
        layer_kinds=("full",) * 2,
        query_scale=0.5,
    )
    return with_kv_copies(config, mesh)


def chain_drafter(target: DecoderConfig, *, replicated: bool = False) -> MadeDrafter:
    config = dflash_config_for(
        target, block_size=4, mask_token_id=VOCABULARY - 1, target_layer_ids=(0, 1), intermediate_size=24
    )
    copies = 1 if replicated else target.kv_copies
    decoder = dataclasses.replace(config.decoder, kv_copies=copies, replicated=replicated)
    config = dataclasses.replace(config, decoder=decoder)
    return dflash(config), dflash_leaves(config, FLOAT32), decoder


def replicated_drafter(target: DecoderConfig) -> MadeDrafter:
    return chain_drafter(target, replicated=True)


def tree_drafter(target: DecoderConfig) -> MadeDrafter:
    config = eagle_config_for(target, kind="eagle3", target_layer_ids=(0, 1))
    decoder = dataclasses.replace(config.decoder, kv_copies=target.kv_copies)
    config = dataclasses.replace(config, decoder=decoder)
    tree = dynamic_tree(width=2, depth=2, draft_length=4)
    return eagle(config, tree=tree), eagle_leaves(config, FLOAT32), decoder


def engine_on(devices: int, make: Callable[[DecoderConfig], MadeDrafter], **options: Any) -> Engine:
    mesh = None if devices == 1 else make_mesh(tensor=devices)
    config = target_config(mesh)
    drafter, leaves, decoder = make(config)
    return Engine(
        method=Method(target=DecoderTarget(config), drafter=drafter),
        models=Models(
            target=placed(decoder_leaves(config, FLOAT32), config, 1, mesh),
            drafter=placed(leaves, decoder, 2, mesh),
        ),
        **{**dict(max_slots=2, max_context=48, page_size=8, chunks=(7,)), **options},
    )


def placed(
    leaves: tuple[Leaf, ...], config: DecoderConfig, seed: int, mesh: jax.sharding.Mesh | None
) -> tuple:
    """The same weights however many copies of a KV head there are."""
    random, units, made = np.random.default_rng(seed), decoder_units(config), []
    for leaf in leaves:
        copies = config.kv_copies if "kv_heads" in leaf.axes else 1
        shape = tuple(
            n // copies if a == "kv_heads" else n for n, a in zip(leaf.shape, leaf.axes, strict=True)
        )
        values = random.normal(0, 0.6, shape) + ("norm" in leaf.path)
        if copies > 1:
            pieces = values.reshape(shape[0], config.num_kv_heads, config.head_size)
            values = np.repeat(pieces, copies, axis=1).reshape(leaf.shape)
        values = values.astype(leaf.dtype)
        if mesh is None:
            made.append(jnp.asarray(values))
            continue
        sharding = leaf_sharding(() if config.replicated else leaf.axes, units, mesh)
        made.append(jax.make_array_from_callback(leaf.shape, sharding, lambda at, values=values: values[at]))
    return tuple(made)
