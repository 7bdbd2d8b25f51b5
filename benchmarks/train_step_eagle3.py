"""The EAGLE-3 side of train_step.py: test-time training of several depths, for jspec and for eager PyTorch.

The PyTorch side does what the public trainers do without fused kernels: the target's head over all tokens, logits
and labels of all rows at every depth, and one key more per depth. jspec leaves out rows that nothing is learned
at; how many those are is a property of the data, here prompts of 256 tokens with answers of 64.
"""

import os
import time

import numpy as np

HIDDEN, HEADS, KV_HEADS, HEAD_SIZE, MLP = 576, 9, 3, 64, 1536
TOKENS, ANSWER, ROWS, VOCABULARY, DRAFTED, STATES = 320, 64, 8, 49152, 8192, 3
DEPTHS, DECAY, RATE, EPS, THETA, CHUNK = 5, 0.8, 6e-4, 1e-5, 10000.0, 16


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
        # Wide.
        "last": 4 * rng.standard_normal((ROWS, TOKENS, HIDDEN), np.float32),
    }


TABLES = ("draft_ids", "embedding", "ids", "features", "last")


def run_jax(steps: int) -> list[tuple[float, float]]:
    """(seconds, loss) of each step."""
    import jax
    import jax.numpy as jnp

    from jspec.drafters.eagle_init import eagle_config_for
    from jspec.drafters.eagle_net import eagle_leaves
    from jspec.objectives.batch import TrainBatch
    from jspec.objectives.eagle3 import Eagle3Objective
    from jspec.objectives.frozen import draft_tables
    from jspec.sharding import make_mesh
    from jspec.targets.config import DecoderConfig
    from jspec.targets.rope import Rope
    from jspec_train.optimizer import adamw, learning_rate_schedule
    from jspec_train.step import Trainer
    from pallas_kernels.pytree import pytree

    @pytree
    class Tables:
        table: jax.Array

        def embed(self, ids: jax.Array) -> jax.Array:
            return self.table[ids]

        def logits(self, hidden: jax.Array) -> jax.Array:
            return hidden @ self.table.T

    given = arrays()
    target = DecoderConfig(
        architecture="llama",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_layers=30,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        norm_eps=EPS,
        max_context=2048,
        full_rope=Rope(theta=THETA),
        layer_kinds=("full",) * 30,
        query_scale=HEAD_SIZE**-0.5,
    )
    config = eagle_config_for(target, kind="eagle3", draft_vocab_size=DRAFTED, own_head=True)
    leaves = eagle_leaves(config, jnp.dtype(jnp.float32))
    trainer = Trainer(
        objective=Eagle3Objective(
            config=config, depths=DEPTHS, decay=DECAY, normaliser="specforge", chunk=CHUNK
        ),
        optimizer=adamw(
            learning_rate_schedule("constant", peak=RATE, total_steps=10**6, warmup_steps=0),
            max_grad_norm=1.0,
        ),
        leaves=leaves,
        mesh=make_mesh(tensor=1),
        seed=0,
        frozen=frozenset({"draft_ids"}),
    )
    index = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (ROWS, TOKENS))
    batch = TrainBatch(
        ids=jnp.asarray(given["ids"]),
        loss_mask=jnp.asarray(index >= TOKENS - ANSWER),
        segments=jnp.ones((ROWS, TOKENS), jnp.int32),
        positions=jnp.asarray(index),
        features=jnp.asarray(np.concatenate([given["features"], given["last"]], axis=2)),
    )
    draft_ids = jnp.asarray(given["draft_ids"])
    tables = draft_tables(Tables(table=jnp.asarray(given["embedding"])), HIDDEN, draft_ids, VOCABULARY)
    state = trainer.start(tuple(jnp.asarray(given[leaf.path]) for leaf in leaves))
    update = jax.jit(trainer.update, donate_argnums=(0,))
    measured = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        state, report = update(state, (draft_ids,), tables, [batch])
        loss = float(report.terms.loss())
        measured.append((time.perf_counter() - start, loss))
    return measured


def run_torch(steps: int) -> list[tuple[float, float]]:
    """(seconds, loss) of each step."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(os.cpu_count() or 1)
    given = {name: torch.from_numpy(array) for name, array in arrays().items()}
    weights = {name: torch.nn.Parameter(given[name]) for name in given if name not in TABLES}
    optimizer = torch.optim.AdamW(list(weights.values()), lr=RATE, weight_decay=0.0)
    table, ids, drafted = given["embedding"], given["ids"].long(), given["draft_ids"].long()
    member = torch.zeros(VOCABULARY, dtype=torch.bool)
    member[drafted] = True
    frequencies = THETA ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)
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

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, EPS)

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = positions[:, None] * frequencies
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(ROWS, TOKENS, count, HEAD_SIZE).transpose(1, 2)

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
        read = norm(state, w["mlp_norm"])
        return state + (F.silu(read @ w["mlp.gate"]) * (read @ w["mlp.up"])) @ w["mlp.down"]

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

    measured = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        optimizer.zero_grad()
        loss = forward()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(weights.values()), 1.0)
        optimizer.step()
        measured.append((time.perf_counter() - start, loss.item()))
    return measured
