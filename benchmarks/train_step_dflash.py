"""The DFlash side of train_step.py: the same arrays and loss for jspec and for eager PyTorch."""

import numpy as np
from train_step_sizes import HEAD_SIZE, HEADS, HIDDEN, KV_HEADS, MLP, ROWS, VOCABULARY

LAYERS, BLOCK, ANCHORS, TOKENS, STATES = 2, 8, 32, 256, 2
GAMMA, CHUNK = 4.0, 32
TABLES = ("embedding", "ids", "anchors", "features")  # what is not trained


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
    from train_step_jspec import TiedTables, decoder, timed_updates, whole_rows

    from jspec.drafters.dflash import dflash_leaves
    from jspec.drafters.dflash_net import DFlashConfig
    from jspec.objectives.batch import TrainBatch
    from jspec.objectives.blocks import Blocks
    from jspec.objectives.dflash import DFlashObjective

    class Given(DFlashObjective):
        def choose(self, batch: TrainBatch, key: jax.Array) -> Blocks:
            return Blocks(anchors=anchors, keep=jnp.ones(anchors.shape, jnp.bool_))

    given = arrays()
    anchors = jnp.asarray(given["anchors"])
    config = DFlashConfig(
        decoder=decoder("qwen3", LAYERS, query_key_norm=True),
        block_size=BLOCK,
        mask_token_id=VOCABULARY - 1,
        target_layer_ids=tuple(range(STATES)),
        num_target_layers=30,
        target_hidden_size=HIDDEN,
    )
    return timed_updates(
        Given(config=config, num_anchors=ANCHORS, gamma=GAMMA, chunk_blocks=CHUNK),
        dflash_leaves(config, jnp.dtype(jnp.float32)),
        given,
        TiedTables(table=jnp.asarray(given["embedding"])),
        whole_rows(given["ids"], given["features"], np.ones((ROWS, TOKENS), bool)),
        steps,
    )


def run_torch(steps: int) -> list[tuple[float, float]]:
    """(seconds, loss) of each step."""
    import torch
    import torch.nn.functional as F
    from train_step_torch import heads, mlp, norm, rotate, tensors, timed_updates

    weights, given = tensors(arrays(), TABLES)
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
            x = mlp(x, w)
        x = norm(x, weights["norm"]).view(ROWS, ANCHORS, BLOCK, HIDDEN)[:, :, 1:]
        logits = x.reshape(-1, HIDDEN) @ table.T
        losses = F.cross_entropy(logits, labels[:, :, 1:].reshape(-1), reduction="none")
        return (losses * decay).sum() / decay.sum()

    return timed_updates(weights, forward, steps)
