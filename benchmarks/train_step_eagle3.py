"""The EAGLE-3 side of train_step.py: test-time training of several depths, for jspec and for eager PyTorch.

The PyTorch side does what the public trainers do without fused kernels: the target's head over all tokens, logits
and labels of all rows at every depth, and one key more per depth. jspec leaves out rows that nothing is learned
at; how many those are is a property of the data, here prompts of 256 tokens with answers of 64.
"""

import numpy as np
from train_step_sizes import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, MLP, ROWS, VOCABULARY

TOKENS, ANSWER, DRAFTED, STATES = 320, 64, 8192, 3
DEPTHS, DECAY, CHUNK = 5, 0.8, 16
TABLES = ("draft_ids", "embedding", "ids", "features", "last")  # what is not trained


def arrays() -> dict[str, np.ndarray]:
    """Weights (matrices [in, out]), tables and one batch."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(0.02)

    ones = np.ones(HIDDEN, np.float32)
    attention = {
        "query": normal(2 * HIDDEN, HEADS * HEAD_SIZE),
        "key": normal(2 * HIDDEN, KV_HEADS * HEAD_SIZE),
        "value": normal(2 * HIDDEN, KV_HEADS * HEAD_SIZE),
        "output": normal(HEADS * HEAD_SIZE, HIDDEN),
    }
    mlp = {"gate": normal(HIDDEN, MLP), "up": normal(HIDDEN, MLP), "down": normal(MLP, HIDDEN)}
    return {
        "fc": normal(STATES * HIDDEN, HIDDEN),
        **{f"layers.0.attention.{name}": array for name, array in attention.items()},
        **{f"layers.0.mlp.{name}": array for name, array in mlp.items()},
        **{f"layers.0.{name}": ones for name in ("embedding_norm", "state_norm", "mlp_norm")},
        "norm": ones,
        "head": normal(HIDDEN, DRAFTED),
        "draft_ids": np.sort(rng.permutation(VOCABULARY)[:DRAFTED]).astype(np.int32),
        "embedding": normal(VOCABULARY, HIDDEN),
        "ids": rng.integers(0, VOCABULARY, (ROWS, TOKENS), np.int32),
        "features": rng.standard_normal((ROWS, TOKENS, STATES * HIDDEN), np.float32),
        # Wide: the target is surer than chance of what comes next.
        "last": 4 * rng.standard_normal((ROWS, TOKENS, HIDDEN), np.float32),
    }


def run_jax(steps: int) -> list[tuple[float, float]]:
    """(seconds, loss) of each step."""
    import jax.numpy as jnp
    from train_step_jspec import TiedTables, decoder, timed_updates, whole_rows

    from jspec.drafters.eagle_init import eagle_config_for
    from jspec.drafters.eagle_net import eagle_leaves
    from jspec.objectives.eagle3 import Eagle3Objective
    from jspec.objectives.frozen import draft_tables

    given = arrays()
    config = eagle_config_for(decoder("llama", 30), kind="eagle3", draft_vocab_size=DRAFTED, own_head=True)
    target = TiedTables(table=jnp.asarray(given["embedding"]))
    answers = np.broadcast_to(np.arange(TOKENS) >= TOKENS - ANSWER, (ROWS, TOKENS))
    return timed_updates(
        Eagle3Objective(config=config, depths=DEPTHS, decay=DECAY, normaliser="specforge", chunk=CHUNK),
        eagle_leaves(config, jnp.dtype(jnp.float32)),
        given,
        draft_tables(target, HIDDEN, jnp.asarray(given["draft_ids"]), VOCABULARY),
        whole_rows(given["ids"], np.concatenate([given["features"], given["last"]], axis=2), answers),
        steps,
        frozen=("draft_ids",),
    )


def run_torch(steps: int) -> list[tuple[float, float]]:
    """(seconds, loss) of each step."""
    import torch
    from train_step_torch import heads, mlp, norm, rotate, tensors, timed_updates

    weights, given = tensors(arrays(), TABLES)
    table, ids, drafted = given["embedding"], given["ids"].long(), given["draft_ids"].long()
    member = torch.zeros(VOCABULARY, dtype=torch.bool)
    member[drafted] = True
    supervised = (torch.arange(TOKENS) >= TOKENS - ANSWER).expand(ROWS, -1).clone()
    supervised[:, -1] = False
    causal = torch.full((TOKENS, TOKENS), float("-inf")).triu(1)
    own = torch.arange(TOKENS)

    def shifted(values: torch.Tensor, count: int) -> torch.Tensor:
        """Moved left, zeros behind."""
        out = torch.zeros_like(values)
        if count < values.shape[1]:
            out[:, : values.shape[1] - count] = values[:, count:]
        return out

    w = {name.removeprefix("layers.0."): p for name, p in weights.items()}

    def layer(embeddings: torch.Tensor, state: torch.Tensor, depth: int, cache: list) -> torch.Tensor:
        both = torch.cat([norm(embeddings, w["embedding_norm"]), norm(state, w["state_norm"])], dim=-1)
        q = rotate(heads(both @ w["attention.query"], HEADS), own + depth)
        k = rotate(heads(both @ w["attention.key"], KV_HEADS), own + depth)
        v = heads(both @ w["attention.value"], KV_HEADS)
        k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
        cache.append((k, v))
        scale = HEAD_SIZE**-0.5
        scores = [q @ cache[0][0].transpose(2, 3) * scale + causal]
        scores += [(q * k).sum(-1, keepdim=True) * scale for k, _ in cache[1:]]
        probs = torch.cat(scores, dim=-1).softmax(-1)
        out = probs[..., :TOKENS] @ cache[0][1]
        for index, (_, v) in enumerate(cache[1:]):
            out = out + probs[..., TOKENS + index, None] * v
        state = state + out.transpose(1, 2).reshape(ROWS, TOKENS, -1) @ w["attention.output"]
        return mlp(state, w)

    def forward() -> torch.Tensor:
        with torch.no_grad():
            logits = shifted(given["last"], 1) @ table.T
            known = member[logits.argmax(-1)]
            among = logits[..., drafted]
            probs = among.softmax(-1)
            accepted = (among - logits.logsumexp(-1, keepdim=True)).exp()
        state, cache, loss = given["features"] @ weights["fc"], [], torch.zeros(())
        for depth in range(DEPTHS):
            state = layer(table[shifted(ids, 1 + depth)], state, depth, cache)
            out = norm(state, weights["norm"]) @ weights["head"]
            log_probs = out.log_softmax(-1)
            mask = shifted(supervised, depth) & shifted(known, depth)
            loss = loss - DECAY**depth * (mask[..., None] * shifted(probs, depth) * log_probs).sum() / (
                ROWS * TOKENS
            )
            with torch.no_grad():  # what is logged at every depth
                torch.minimum(shifted(accepted, depth), log_probs.exp()).sum(-1)
                out.argmax(-1)
        return loss

    return timed_updates(weights, forward, steps)
