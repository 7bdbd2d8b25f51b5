"""AdamW on float32 masters: schedules, clipping, and one update from a window of micro-batches."""

import math
from collections.abc import Callable
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jspec.net import Leaf, Params

ScheduleName = Literal["cosine", "constant", "cosine_chained"]
Schedule = Callable[[Int[Array, ""]], Float[Array, ""]]


def learning_rate_schedule(
    name: ScheduleName, *, peak: float, total_steps: int, warmup_steps: int
) -> Schedule:
    """The learning rate of update s = 0, 1, ...

    Warm-up: peak * (s + 1) / warmup_steps, so that no update has rate 0. Then "constant", or "cosine":
    from the peak at s = warmup_steps to 0 at s = total_steps, and 0 after it.

    "cosine_chained" is what SpecForge gets from chaining two PyTorch schedulers: the same curve times
    2 / (1 + cos(pi / (total_steps - warmup_steps))), hence above the peak where it starts, and rising
    again after total_steps. It exists to repeat such a run; "cosine" is the one meant.

    Raises:
      ValueError: an unknown name, or steps that leave nothing after the warm-up.
    """
    if name not in get_args(ScheduleName):
        raise ValueError(f"schedule: expected one of {', '.join(get_args(ScheduleName))}, got {name!r}")
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(
            f"warmup_steps: expected 0 to {total_steps - 1} (total_steps - 1), got {warmup_steps}; lower it"
        )
    length = total_steps - warmup_steps

    def schedule(step: Int[Array, ""]) -> Float[Array, ""]:
        step = jnp.asarray(step, jnp.float32)
        warm = peak * (step + 1) / max(warmup_steps, 1)
        done = (step - warmup_steps) / length
        if name == "constant":
            after = jnp.full((), peak)
        elif name == "cosine":
            after = peak * 0.5 * (1 + jnp.cos(jnp.pi * jnp.clip(done, 0, 1)))
        else:
            factor = 2 / (1 + math.cos(math.pi / length)) if length > 1 else 1.0
            after = factor * peak * 0.5 * (1 + jnp.cos(jnp.pi * done))
        return jnp.where(step < warmup_steps, warm, after)

    return schedule


def adamw(
    schedule: Schedule,
    *,
    max_grad_norm: float | None,
    weight_decay: float = 0.0,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Global-norm clipping, then AdamW.

    The clipping factor is min(1, max_grad_norm / (norm + 1e-6)), PyTorch's; optax's own has no 1e-6.
    """
    steps = [] if max_grad_norm is None else [_clip(max_grad_norm)]
    return optax.chain(
        *steps, optax.adamw(cast(Any, schedule), b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)
    )


def _clip(max_norm: float) -> optax.GradientTransformation:
    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        factor = jnp.minimum(1.0, max_norm / (optax.tree.norm(updates) + 1e-6))
        return jax.tree.map(lambda g: g * factor, updates), state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def to_compute(masters: Params, leaves: tuple[Leaf, ...]) -> Params:
    """The weights that forward and backward passes use: each master in the dtype of its leaf."""
    return tuple(m.astype(leaf.dtype) for m, leaf in zip(masters, leaves, strict=True))
