"""What a block drafter computes, written from the definition: numpy, float64, one block, no cache."""

import jax.numpy as jnp
import numpy as np
from block_engine import HEAD_SIZE, HEADS, KV_HEADS, MASK, ROPE, WINDOW_ROPE, Engine, feature

from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash_net import DFlashConfig


def named_weights(config: DFlashConfig, params: tuple) -> dict[str, np.ndarray]:
    """The params by the names of their leaves."""
    leaves = dflash_leaves(config, jnp.dtype(jnp.float32))
    return {leaf.path: np.asarray(value, np.float64) for leaf, value in zip(leaves, params, strict=True)}


def convolved(
    config: DFlashConfig, w: dict[str, np.ndarray], name: str, side: int, rows: np.ndarray, source: np.ndarray
) -> np.ndarray:
    """One side of a convolution, whose kernels come from `source`."""
    if config.convolution is None:
        return rows
    taps, size = config.convolution.taps, config.convolution.group_size
    kernels = (source @ w[f"{name}.kernel_projection"]).reshape(len(rows), 2, taps, -1)
    out = np.zeros_like(rows)
    for row, tap, column in np.ndindex(len(rows), taps, rows.shape[1]):
        if tap <= row:
            coefficient = (
                w[f"{name}.base_kernel"][side, tap, column] + kernels[row, side, tap, column // size]
            )
            out[row, column] += coefficient * rows[row - tap, column]
    return out


def dense_logits(config: DFlashConfig, engine: Engine, slot: int, context: int) -> np.ndarray:
    """The target's logits of the block's rows 1.. ."""
    hidden = dense_hidden(config, engine, slot, context)[1:]
    logits = hidden @ np.asarray(engine.target_params[1], np.float64)
    return engine.target.softcap * np.tanh(logits / engine.target.softcap)


def dense_hidden(config: DFlashConfig, engine: Engine, slot: int, context: int) -> np.ndarray:
    """Hidden states of a block after the final norm, by the definition and in float64."""
    named = named_weights(config, engine.params)
    norm = lambda x, w: x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * w  # noqa: E731

    def turned(x: np.ndarray, positions: np.ndarray, theta: float) -> np.ndarray:
        angles = positions[:, None] / theta ** (np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        a, b = np.split(x, 2, axis=-1)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    block = config.block_size
    at = np.arange(context + block)  # positions of keys: context, then block
    features = np.stack([feature(engine.requests[slot], p) for p in range(context)]).astype(np.float64)
    seen = norm(features @ named["fc"], named["hidden_norm"])
    ids = [int(engine.text.tokens[slot, context])] + [MASK] * (block - 1)
    if config.own_embedding:
        x = named["embedding"][ids]
    else:
        x = np.asarray(engine.target_params[0], np.float64)[ids] * engine.target.embedding_scale
    for index, kind in enumerate(config.decoder.layer_kinds):
        w = {
            k.removeprefix(f"layers.{index}."): v
            for k, v in named.items()
            if k.startswith(f"layers.{index}.")
        }
        theta = (WINDOW_ROPE if kind == "window" else ROPE).theta
        h = norm(x, w["attention_norm"])
        read = convolved(config, w, "attention_conv", 0, h, h)

        def heads(y: np.ndarray, name: str, w: dict = w) -> np.ndarray:
            out = y @ w[f"attention.{name}"] + w.get(f"attention.{name}_bias", 0)
            return out.reshape(len(y), -1, HEAD_SIZE)

        q = turned(norm(heads(read, "query"), w["attention.query_norm"]), at[context:], theta)
        both = np.concatenate([seen, read])
        k = turned(norm(heads(both, "key"), w["attention.key_norm"]), at, theta)
        v = heads(both, "value")
        causal = kind == "window" if config.is_causal is None else config.is_causal
        delta = at[context:, None] - at[None, :]
        allowed = np.ones_like(delta, bool)
        if causal:
            allowed &= delta >= 0
        if kind == "window":
            allowed &= delta < config.decoder.window
        out = np.zeros((block, HEADS, HEAD_SIZE))
        for head in range(HEADS):
            g = head // (HEADS // KV_HEADS)
            scores = np.where(allowed, q[:, head] @ k[:, g].T / np.sqrt(HEAD_SIZE), -np.inf)
            p = np.exp(scores - scores.max(axis=1, keepdims=True))
            out[:, head] = p / p.sum(axis=1, keepdims=True) @ v[:, g]
        out = out.reshape(block, -1) @ w["attention.output"] + w.get("attention.output_bias", 0)
        x = x + convolved(config, w, "attention_conv", 1, out, h)
        h = norm(x, w["mlp_norm"])
        read = convolved(config, w, "mlp_conv", 0, h, h)
        gate = read @ w["mlp.gate"]
        out = (gate / (1 + np.exp(-gate)) * (read @ w["mlp.up"])) @ w["mlp.down"]
        x = x + convolved(config, w, "mlp_conv", 1, out, h)
    return norm(x, named["norm"])
