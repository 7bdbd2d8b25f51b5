"""Attention written out densely in numpy, float64, one query and head at a time."""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lane:
    """What one lane really holds; no padding, no pages."""

    q: np.ndarray  # [queries, heads, head_size]
    context_k: np.ndarray  # [context, kv_heads, head_size]
    context_v: np.ndarray
    k: np.ndarray  # [keys, kv_heads, head_size], in flight
    v: np.ndarray
    first_visible: np.ndarray  # [queries]
    sees: np.ndarray  # [queries, keys] bool, of the in-flight keys


def causal_mask(num_queries: int, num_keys: int, context: int, first_visible: np.ndarray) -> np.ndarray:
    """The in-flight keys that a causal lane's queries see."""
    mask = np.zeros((num_queries, num_keys), bool)
    for i in range(num_queries):
        for j in range(num_keys):
            mask[i, j] = j <= i + num_keys - num_queries and context + j >= first_visible[i]
    return mask


def pack_bits(mask: np.ndarray, words: int) -> np.ndarray:
    """[queries, keys] bool to [queries, words] int32, bit j % 32 of word j // 32."""
    packed = np.zeros((mask.shape[0], words), np.uint32)
    for i, j in zip(*np.nonzero(mask), strict=True):
        packed[i, j // 32] |= np.uint32(1) << np.uint32(j % 32)
    return packed.view(np.int32)


def dense(
    lane: Lane, *, scale: float, softcap: float | None = None, sinks: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output [queries, heads, value_size] and log-sum-exp [queries, heads] of one lane."""
    queries, heads, _ = lane.q.shape
    kv_heads, value_size = lane.v.shape[1:]
    out, logsumexp = np.zeros((queries, heads, value_size)), np.full((queries, heads), -np.inf)
    context = np.arange(len(lane.context_k))
    for i in range(queries):
        seen = context >= lane.first_visible[i]
        k = np.concatenate([lane.context_k[seen], lane.k[lane.sees[i]]]).astype(np.float64)
        v = np.concatenate([lane.context_v[seen], lane.v[lane.sees[i]]]).astype(np.float64)
        for h in range(heads):
            g = h // (heads // kv_heads)
            scores = k[:, g] @ lane.q[i, h].astype(np.float64) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            logits = scores if sinks is None else np.append(scores, sinks[h])
            if len(logits) == 0:
                continue
            logsumexp[i, h] = np.log(np.sum(np.exp(logits - logits.max()))) + logits.max()
            out[i, h] = np.exp(scores - logsumexp[i, h]) @ v[:, g]
    return out, logsumexp
