"""The eager PyTorch side of train_step.py, whatever the method: AdamW on the same arrays, timed."""

import os
import time
from collections.abc import Callable, Collection, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from train_step_sizes import EPS, HEAD_SIZE, MAX_GRAD_NORM, RATE, ROWS, THETA

Weights = dict[str, torch.nn.Parameter]


def tensors(
    arrays: Mapping[str, np.ndarray], given: Collection[str]
) -> tuple[Weights, dict[str, torch.Tensor]]:
    """Arrays as weights to train, and those named in `given` as they are."""
    torch.set_num_threads(os.cpu_count() or 1)
    held = {name: torch.from_numpy(array) for name, array in arrays.items()}
    weights = {name: torch.nn.Parameter(t) for name, t in held.items() if name not in given}
    return weights, {name: held[name] for name in given}


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """RMSNorm over the last axis."""
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def heads(x: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, tokens, count x head_size] as [rows, count, tokens, head_size]."""
    return x.view(ROWS, -1, count, HEAD_SIZE).transpose(1, 2)


def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [rows, heads, tokens, head_size] at positions [tokens] or [rows, tokens]."""
    frequencies = THETA ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
    angle = (positions[..., None] * frequencies).unsqueeze(-3)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)


def mlp(x: torch.Tensor, w: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Gated by SiLU, behind a norm, added to x."""
    read = norm(x, w["mlp_norm"])
    return x + (F.silu(read @ w["mlp.gate"]) * (read @ w["mlp.up"])) @ w["mlp.down"]


def timed_updates(
    weights: Weights, forward: Callable[[], torch.Tensor], steps: int
) -> list[tuple[float, float]]:
    """(seconds, loss) of each update; one more than `steps`."""
    optimizer = torch.optim.AdamW(list(weights.values()), lr=RATE, weight_decay=0.0)
    measured = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), MAX_GRAD_NORM)
        optimizer.step()
        measured.append((time.perf_counter() - start, loss.item()))
    return measured
