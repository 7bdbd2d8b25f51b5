"""Rotary position embedding: frequencies of every scaling rule we know, and the rotation itself."""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Linear:
    """All frequencies divided by one factor."""

    factor: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3:
    """Long waves divided by a factor, short ones kept, a straight line between (Llama 3.1)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Yarn:
    """Interpolation of long waves with a ramp counted in rotations, and scaled sines (arXiv 2309.00071)."""

    factor: float
    original_context: int
    attention_factor: float  # multiplies cos and sin, so scores grow by its square
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # ramp bounds rounded outwards to whole dimensions


@dataclasses.dataclass(frozen=True, kw_only=True)
class Divisors:
    """One divisor per frequency, as GGUF files store a scaling rule that they have already applied."""

    values: tuple[float, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rope:
    """The rotary embedding of one kind of layer."""

    theta: float
    scaling: Linear | Llama3 | Yarn | Divisors | None = None


def yarn_attention_factor(
    factor: float, mscale: float | None = None, mscale_all_dim: float | None = None
) -> float:
    """The factor on cos and sin when a checkpoint does not state it.

    Source: transformers 5, modeling_rope_utils, yarn: 0.1 ln(factor) + 1, or the ratio of the two
    forms when both mscale values are given (DeepSeek).
    """

    def grown(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if mscale and mscale_all_dim:
        return grown(mscale) / grown(mscale_all_dim)
    return grown(1.0)


def inverse_frequencies(rope: Rope, head_size: int) -> np.ndarray:
    """Radians per position of each pair of dimensions, float32 [head_size / 2].

    Rounded to float32 where transformers rounds, because positions multiply the error.

    Raises:
      ValueError: if stored divisors do not match the head size.
    """
    exponents = np.arange(0, head_size, 2, dtype=np.float32) / np.float32(head_size)
    wave = (rope.theta ** exponents.astype(np.float64)).astype(np.float32)
    plain = np.float32(1) / wave
    match rope.scaling:
        case None:
            return plain
        case Linear(factor=factor):
            return plain / np.float32(factor)
        case Divisors(values=values):
            if len(values) != head_size // 2:
                raise ValueError(f"rope: expected {head_size // 2} frequency divisors, got {len(values)}")
            return plain / np.asarray(values, np.float32)
        case Llama3() as rule:
            return _llama3(rule, plain)
        case Yarn() as rule:
            return _yarn(rule, rope.theta, head_size, wave)


def _llama3(rule: Llama3, plain: np.ndarray) -> np.ndarray:
    turns = rule.original_context * plain.astype(np.float64) / (2 * math.pi)  # over the original context
    keep = (turns - rule.low_freq_factor) / (rule.high_freq_factor - rule.low_freq_factor)
    keep = np.clip(keep, 0.0, 1.0)
    return ((1 - keep) * plain / rule.factor + keep * plain).astype(np.float32)


def _yarn(rule: Yarn, theta: float, head_size: int, wave: np.ndarray) -> np.ndarray:
    def dimension(turns: float) -> float:
        return head_size * math.log(rule.original_context / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rule.beta_fast), dimension(rule.beta_slow)
    if rule.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_size - 1)
    width = high - low if high != low else 0.001
    stretched = np.clip((np.arange(head_size // 2, dtype=np.float32) - low) / width, 0, 1).astype(np.float32)
    wave = wave.astype(np.float32)
    return (stretched / (np.float32(rule.factor) * wave) + (1 - stretched) / wave).astype(np.float32)


def rotation(
    rope: Rope, head_size: int, positions: Int[Array, "nodes"]
) -> tuple[Float32[Array, "nodes half"], Float32[Array, "nodes half"]]:
    """Cosine and sine of every node's angles, times the scaling rule's attention factor."""
    angles = positions[:, None].astype(jnp.float32) * inverse_frequencies(rope, head_size)[None, :]
    factor = rope.scaling.attention_factor if isinstance(rope.scaling, Yarn) else 1.0
    if factor == 1.0:
        return jnp.cos(angles), jnp.sin(angles)
    return jnp.cos(angles) * factor, jnp.sin(angles) * factor


def rotate(
    x: Float[Array, "nodes heads head_size"],
    cos: Float32[Array, "nodes half"],
    sin: Float32[Array, "nodes half"],
) -> Float[Array, "nodes heads head_size"]:
    """Turns dimension i together with dimension i + head_size / 2, in float32; returns x's dtype."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)
