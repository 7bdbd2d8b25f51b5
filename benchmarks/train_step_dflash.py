"""The DFlash side of train_step.py: the same arrays and loss for jspec and for eager PyTorch."""

import os
import time

import numpy as np

HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE, MLP = 576, 2, 9, 3, 64, 1536
BLOCK, ANCHORS, TOKENS, VOCABULARY, ROWS, STATES = 8, 32, 256, 49152, 8, 2
GAMMA, RATE, EPS, THETA = 4.0, 6e-4, 1e-5, 10000.0
CHUNK = 32


def arrays() -> dict[str, np.ndarray]:
    """Weights (matrices [in, out]), tables and one batch; the anchors are given, not drawn."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32) * np.float32(0.02)

    weights = {"fc": normal(STATES * HIDDEN, HIDDEN), "hidden_norm": np.ones(HIDDEN, np.float32)}
    for i in range(LAYERS):
        weights |= {
            f"layers.{i}.attention.query": normal(HIDDEN, HEADS * HEAD_SIZE),
            f"layers.{i}.attention.key": normal(HIDDEN, KV_HEADS * HEAD_SIZE),
            f"layers.{i}.attention.value": normal(HIDDEN, KV_HEADS * HEAD_SIZE),
            f"layers.{i}.attention.output": normal(HEADS * HEAD_SIZE, HIDDEN),
            f"layers.{i}.attention.query_norm": np.ones(HEAD_SIZE, np.float32),
            f"layers.{i}.attention.key_norm": np.ones(HEAD_SIZE, np.float32),
            f"layers.{i}.attention_norm": np.ones(HIDDEN, np.float32),
            f"layers.{i}.mlp_norm": np.ones(HIDDEN, np.float32),
            f"layers.{i}.mlp.gate": normal(HIDDEN, MLP),
            f"layers.{i}.mlp.up": normal(HIDDEN, MLP),
            f"layers.{i}.mlp.down": normal(MLP, HIDDEN),
        }
    weights["norm"] = np.ones(HIDDEN, np.float32)
    anchors = np.sort(
        np.stack([rng.permutation(np.arange(32, TOKENS - BLOCK))[:ANCHORS] for _ in range(ROWS)]), axis=1
    )
    return weights | {
        "embedding": normal(VOCABULARY, HIDDEN),
        "ids": rng.integers(0, VOCABULARY - 1, (ROWS, TOKENS), np.int32),
        "anchors": anchors.astype(np.int32),
        "features": rng.standard_normal((ROWS, TOKENS, STATES * HIDDEN), np.float32),
    }


def run_jax(steps: int) -> list[tuple[float, float]]:
    """(seconds, loss) of each step."""
    import jax
    import jax.numpy as jnp

    from jspec.drafters.dflash import dflash_leaves
    from jspec.drafters.dflash_net import DFlashConfig
    from jspec.objectives.batch import TrainBatch
    from jspec.objectives.blocks import Blocks
    from jspec.objectives.dflash import DFlashObjective
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
    decoder = DecoderConfig(
        architecture="qwen3",
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=MLP,
        num_layers=LAYERS,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_size=HEAD_SIZE,
        norm_eps=EPS,
        max_context=2048,
        full_rope=Rope(theta=THETA),
        layer_kinds=("full",) * LAYERS,
        query_key_norm=True,
        query_scale=HEAD_SIZE**-0.5,
    )
    config = DFlashConfig(
        decoder=decoder,
        block_size=BLOCK,
        mask_token_id=VOCABULARY - 1,
        target_layer_ids=tuple(range(STATES)),
        num_target_layers=30,
        target_hidden_size=HIDDEN,
    )

    class Given(DFlashObjective):
        def choose(self, batch: TrainBatch, key: jax.Array) -> Blocks:
            return Blocks(anchors=given_anchors, keep=jnp.ones(given_anchors.shape, jnp.bool_))

    given_anchors = jnp.asarray(given["anchors"])
    leaves = dflash_leaves(config, jnp.dtype(jnp.float32))
    trainer = Trainer(
        objective=Given(config=config, num_anchors=ANCHORS, gamma=GAMMA, chunk_blocks=CHUNK),
        optimizer=adamw(
            learning_rate_schedule("constant", peak=RATE, total_steps=10**6, warmup_steps=0),
            max_grad_norm=1.0,
        ),
        leaves=leaves,
        mesh=make_mesh(tensor=1),
        seed=0,
    )
    index = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), (ROWS, TOKENS))
    batch = TrainBatch(
        ids=jnp.asarray(given["ids"]),
        loss_mask=jnp.ones((ROWS, TOKENS), jnp.bool_),
        segments=jnp.ones((ROWS, TOKENS), jnp.int32),
        positions=jnp.asarray(index),
        features=jnp.asarray(given["features"]),
    )
    target = Tables(table=jnp.asarray(given["embedding"]))
    state = trainer.start(tuple(jnp.asarray(given[leaf.path]) for leaf in leaves))
    update = jax.jit(trainer.update, donate_argnums=(0,))
    measured = []
    for _ in range(steps + 1):
        start = time.perf_counter()
        state, report = update(state, (), target, [batch])
        loss = float(report.terms.loss())
        measured.append((time.perf_counter() - start, loss))
    return measured


def run_torch(steps: int) -> list[tuple[float, float]]:
    """(seconds, loss) of each step."""
    import torch
    import torch.nn.functional as F

    torch.set_num_threads(os.cpu_count() or 1)
    given = {name: torch.from_numpy(array) for name, array in arrays().items()}
    names = [n for n in given if n not in ("embedding", "ids", "anchors", "features")]
    weights = {name: torch.nn.Parameter(given[name]) for name in names}
    optimizer = torch.optim.AdamW(list(weights.values()), lr=RATE, weight_decay=0.0)
    table, ids, anchors = given["embedding"], given["ids"].long(), given["anchors"].long()
    offsets = torch.arange(BLOCK)
    places = anchors[:, :, None] + offsets
    labels = torch.gather(ids, 1, places.reshape(ROWS, -1)).reshape(places.shape)
    block_ids = torch.full_like(places, VOCABULARY - 1)
    block_ids[:, :, 0] = labels[:, :, 0]
    decay = torch.exp(-(offsets[1:] - 1) / GAMMA).expand(ROWS, ANCHORS, -1).reshape(-1)
    own = torch.arange(ANCHORS).repeat_interleave(BLOCK)
    context = torch.arange(TOKENS)[None, None] < anchors.repeat_interleave(BLOCK, 1)[:, :, None]
    mask = torch.cat([context, (own[:, None] == own[None]).expand(ROWS, -1, -1)], dim=2)[:, None]
    frequencies = THETA ** (-torch.arange(0, HEAD_SIZE, 2) / HEAD_SIZE)

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, EPS)

    def rotate(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        angle = (positions[..., None] * frequencies)[:, None]
        a, b = x.chunk(2, dim=-1)
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1)

    def heads(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.view(ROWS, -1, count, HEAD_SIZE).transpose(1, 2)

    block_places = places.reshape(ROWS, -1)
    token_places = torch.arange(TOKENS).expand(ROWS, -1)

    def forward() -> torch.Tensor:
        states = norm(given["features"] @ weights["fc"], weights["hidden_norm"])
        x = table[block_ids.reshape(ROWS, -1)]
        for i in range(LAYERS):
            w = {
                n.removeprefix(f"layers.{i}."): p for n, p in weights.items() if n.startswith(f"layers.{i}.")
            }
            read = norm(x, w["attention_norm"])
            q = rotate(
                norm(heads(read @ w["attention.query"], HEADS), w["attention.query_norm"]), block_places
            )
            keys, values = [], []
            for source, at in ((states, token_places), (read, block_places)):
                k = norm(heads(source @ w["attention.key"], KV_HEADS), w["attention.key_norm"])
                keys.append(rotate(k, at))
                values.append(heads(source @ w["attention.value"], KV_HEADS))
            out = F.scaled_dot_product_attention(
                q, torch.cat(keys, 2), torch.cat(values, 2), attn_mask=mask, enable_gqa=True
            )
            x = x + out.transpose(1, 2).reshape(ROWS, -1, HEADS * HEAD_SIZE) @ w["attention.output"]
            read = norm(x, w["mlp_norm"])
            x = x + (F.silu(read @ w["mlp.gate"]) * (read @ w["mlp.up"])) @ w["mlp.down"]
        x = norm(x, weights["norm"]).view(ROWS, ANCHORS, BLOCK, HIDDEN)[:, :, 1:]
        logits = x.reshape(-1, HIDDEN) @ table.T
        losses = F.cross_entropy(logits, labels[:, :, 1:].reshape(-1), reduction="none")
        return (losses * decay).sum() / decay.sum()

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
