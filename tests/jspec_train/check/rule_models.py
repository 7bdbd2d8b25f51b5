"""A tiny target on disk, texts that it writes itself, and drafters trained on them in seconds."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tokenizers
from safetensors.numpy import save_file

from jspec.capture import Capture
from jspec.checkpoints.hf_config import config_from_hf
from jspec.checkpoints.hf_target import hf_plan
from jspec.checkpoints.target import load_target
from jspec.drafters.dflash import dflash_leaves
from jspec.drafters.dflash_init import init_dflash_params
from jspec.drafters.dflash_net import DFlashConfig
from jspec.drafters.eagle_init import eagle_config_for, init_eagle_params
from jspec.drafters.eagle_net import EagleConfig, eagle_leaves
from jspec.features import feature_contract, layer_outputs
from jspec.net import Leaf, Params, net_of
from jspec.objectives.batch import TrainBatch
from jspec.objectives.dflash import DFlashObjective
from jspec.objectives.eagle import EagleObjective
from jspec.objectives.eagle3 import Eagle3Objective
from jspec.objectives.frozen import FrozenTarget, Tables, draft_tables
from jspec.sharding import make_mesh
from jspec.targets.config import DecoderConfig
from jspec.targets.decoder import DecoderTarget, decoder_leaves
from jspec.targets.layers import Decoder
from jspec.targets.rope import rotation
from jspec.text.tokenizer import load_tokenizer
from jspec_train.check.program import Extent, check
from jspec_train.check.subject import open_subject
from jspec_train.data.chat import Chat
from jspec_train.drafters import drafter_config
from jspec_train.optimizer import adamw, learning_rate_schedule
from jspec_train.recipe_parts import DrafterPart
from jspec_train.sample import Sample
from jspec_train.sample_header import Header
from jspec_train.samples import SampleWriter
from jspec_train.step import Objective, Trainer

VOCABULARY, HIDDEN, MASK, TOKENS, PROMPT = 32, 32, 31, 48, 6
SAID, MODES = 24, 4  # tokens that texts consist of, and rules by which they follow one another
DRAFTED = (*range(SAID), 26, 29)  # ids of a reduced vocabulary
LAYER_IDS = (0, 2)
TRAINED_ON, HELD_OUT, STEPS = 256, 12, 400
TEMPLATE = "{% for m in messages %}w1 {{ m.content }} w2 {% endfor %}"
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}


@dataclasses.dataclass(frozen=True)
class World:
    """A target's folder, held-out samples that it wrote, and what drafters are trained on."""

    folder: Path
    model: Path
    samples: Path
    frozen: FrozenTarget
    batch: TrainBatch


def make_world(folder: Path) -> World:
    model = write_target(folder / "target")
    loaded = load_target(model, dtype="float32")
    ids = greedy_texts(loaded.target, loaded.params, rule_texts(TRAINED_ON + HELD_OUT, seed=7))
    return World(
        folder=folder,
        model=model,
        samples=write_samples(folder / "samples", model, ids[TRAINED_ON:]),
        frozen=FrozenTarget(params=loaded.params, target=loaded.target),
        batch=batch_of(loaded.target, loaded.params, ids[:TRAINED_ON]),
    )


def statuses(world: World, drafter: Path, data: Path | None, *, decode: bool = False):
    """Status and line of every step, and the diagnosis."""
    subject = open_subject(str(world.model), str(drafter), data, "float32")
    verdict = check(subject, Extent(samples=HELD_OUT, tokens=24, decode=decode))
    return {f.step: (f.status, f.said) for f in verdict.findings}, verdict.diagnosis


def copied(drafter: Path, folder: Path, **config) -> Path:
    """A drafter without its contract, with changes to config.json, of a mapping to its parts."""
    shutil.copytree(drafter, folder, ignore=shutil.ignore_patterns("feature_contract.json"))
    values = json.loads((folder / "config.json").read_text())
    for key, value in config.items():
        values[key] = values[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(values))
    return folder


def failing(found) -> set[int]:
    return {step for step, (status, _) in found.items() if status == "fail"}


def rule_texts(texts: int, seed: int) -> np.ndarray:
    """int32 [texts, TOKENS]: a prompt that names one of the rules and a token, and what follows from both."""
    rng = np.random.default_rng(0)
    follows = []
    for _ in range(MODES):
        order = rng.permutation(SAID)
        follows.append(dict(zip(order, np.roll(order, -1), strict=True)))
    rng = np.random.default_rng(seed)
    ids = np.zeros((texts, TOKENS), np.int32)
    for row in ids:
        mode, token = rng.integers(MODES), rng.integers(SAID)
        row[:PROMPT] = SAID + mode
        for place in range(PROMPT - 1, TOKENS):
            row[place] = token
            token = follows[mode][token]
    return ids


def write_target(folder: Path) -> Path:
    """A Llama that has learned the rules."""
    config = config_from_hf(CONFIG)
    leaves = decoder_leaves(config, jnp.dtype(jnp.float32))
    params = tuple(
        jnp.ones(leaf.shape)
        if leaf.path.endswith("norm")
        else 0.2 * jax.random.normal(jax.random.key(number), leaf.shape)
        for number, leaf in enumerate(leaves)
    )
    params = _taught(config, params, rule_texts(256, seed=1))
    origins = hf_plan(config, ()).origins
    tensors = {}
    for leaf, values in zip(leaves, params, strict=True):
        origin, values = origins[leaf.path], np.asarray(values)
        tensors[origin.name] = np.ascontiguousarray(values.T if origin.transposed else values)
    folder.mkdir(parents=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    words = tokenizers.models.WordLevel({f"w{i}": i for i in range(MASK)}, unk_token="w0")
    tokenizers.Tokenizer(words).save(str(folder / "tokenizer.json"))
    about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(about))
    return folder


def _taught(config: DecoderConfig, params: Params, ids: np.ndarray, steps: int = 300) -> Params:
    optimizer = optax.adam(5e-3)
    causal = jnp.tril(jnp.ones((TOKENS, TOKENS), jnp.bool_))[None]

    def see(q, k, v):
        scores = jnp.einsum("qhd,khd->hqk", q, k) * config.query_scale
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(causal, scores, -1e9)), v)

    def loss(params, ids):
        model = net_of(Decoder, config, jnp.dtype(jnp.float32)).module(params)
        turn = rotation(config.full_rope, config.head_size, jnp.arange(TOKENS))

        def one(text):
            x = model.embed(text)
            for layer in model.layers:
                x, _, _ = layer(x, turn, see)
            scores = model.logits(model.final_norm(x))[PROMPT - 1 : -1]
            return optax.softmax_cross_entropy_with_integer_labels(scores, text[PROMPT:]).mean()

        return jax.vmap(one)(ids).mean()

    @jax.jit
    def many(params, ids):
        def one(number, state):
            params, moments = state
            piece = jax.lax.dynamic_slice_in_dim(ids, number * 16 % ids.shape[0], 16)
            updates, moments = optimizer.update(jax.grad(loss)(params, piece), moments)
            return optax.apply_updates(params, updates), moments

        return jax.lax.fori_loop(0, steps, one, (params, optimizer.init(params)))[0]

    return many(params, jnp.asarray(ids))


def greedy_texts(target: DecoderTarget, params: Params, prompts: np.ndarray) -> np.ndarray:
    """int32 [texts, TOKENS]: the first PROMPT tokens, and what the target says then."""
    capture = Capture(target=target, names=("final_norm",), dtype="float32", buckets=(TOKENS,))

    @jax.jit
    def write(prompts):
        def one(ids):
            def add(place, ids):
                hidden = capture.one(params, ids, place)[place - 1]
                return ids.at[place].set(jnp.argmax(target.logits(params, hidden[None])[0]))

            return jax.lax.fori_loop(PROMPT, TOKENS, add, ids)

        return jax.lax.map(one, prompts)

    return np.asarray(write(jnp.asarray(prompts)))


def batch_of(target: DecoderTarget, params: Params, ids: np.ndarray) -> TrainBatch:
    """The texts, supervised behind their prompts, with features and what the target's head reads."""
    names = (*layer_outputs(LAYER_IDS), "final_norm")
    capture = Capture(target=target, names=names, dtype="float32", buckets=(TOKENS,))
    index = np.broadcast_to(np.arange(TOKENS, dtype=np.int32), ids.shape)
    batch = TrainBatch(
        ids=jnp.asarray(ids),
        loss_mask=jnp.asarray(index >= PROMPT),
        segments=jnp.ones(ids.shape, jnp.int32),
        positions=jnp.asarray(index),
        features=jnp.zeros((*ids.shape, 0)),
    )
    return jax.jit(capture.batch)(params, batch)


def drafter_part(**options) -> DrafterPart:
    sizes = dict(num_layers=1, block_size=4, target_layer_ids=LAYER_IDS, head_size=16, intermediate_size=64)
    return DrafterPart(**sizes | options)


def train_block_drafter(world: World) -> tuple[DFlashConfig, Params]:
    config = drafter_config(drafter_part(), world.frozen.target.config, MASK)
    batch = dataclasses.replace(world.batch, features=world.batch.features[:, :, : len(LAYER_IDS) * HIDDEN])
    return config, _trained(
        DFlashObjective(config=config, num_anchors=16, chunk_blocks=256),
        dflash_leaves(config, jnp.dtype(jnp.float32)),
        init_dflash_params(config, jax.random.key(0), jnp.float32, initializer_range=0.1),
        world.frozen,
        batch,
    )


def train_eagle3(world: World, **options) -> tuple[EagleConfig, Params]:
    """An EAGLE-3 drafter of a reduced vocabulary, with a head of its own."""
    target = world.frozen.target
    config = eagle_config_for(
        target.config,
        kind="eagle3",
        target_layer_ids=LAYER_IDS,
        own_head=True,
        draft_vocab_size=len(DRAFTED),
        **options,
    )
    ids = jnp.asarray(DRAFTED, jnp.int32)
    return config, _trained(
        Eagle3Objective(config=config, depths=4, chunk=TOKENS),
        eagle_leaves(config, jnp.dtype(jnp.float32)),
        init_eagle_params(config, jax.random.key(0), jnp.float32, draft_ids=ids, initializer_range=0.1),
        draft_tables(world.frozen, HIDDEN, ids, VOCABULARY),
        world.batch,
    )


def train_eagle(world: World) -> tuple[EagleConfig, Params]:
    """An EAGLE drafter; it reads what the target's head reads."""
    config = eagle_config_for(world.frozen.target.config, kind="eagle", fc_bias=True)
    return config, _trained(
        EagleObjective(config=config, chunk=TOKENS),
        eagle_leaves(config, jnp.dtype(jnp.float32)),
        init_eagle_params(config, jax.random.key(0), jnp.float32, initializer_range=0.1),
        world.frozen,
        dataclasses.replace(world.batch, features=world.batch.features[:, :, -HIDDEN:]),
    )


def _trained(
    objective: Objective, leaves: tuple[Leaf, ...], params: Params, tables: Tables, batch: TrainBatch
) -> Params:
    """A few hundred quick updates."""
    schedule = learning_rate_schedule("cosine", peak=5e-3, total_steps=STEPS, warmup_steps=10)
    trainer = Trainer(
        objective=objective,
        optimizer=adamw(schedule, max_grad_norm=1.0),
        leaves=leaves,
        mesh=make_mesh(tensor=1, data=1),
        seed=0,
    )
    state = trainer.start(params)
    kept = tuple(p for p, leaf in zip(params, leaves, strict=True) if leaf.path in trainer.frozen)
    texts, rows = batch.ids.shape[0], 16

    @jax.jit
    def many(state, batch):
        def one(number, state):
            first = number * rows % texts
            piece = jax.tree.map(lambda a: jax.lax.dynamic_slice_in_dim(a, first, rows), batch)
            return trainer.update(state, kept, tables, [piece])[0]

        return jax.lax.fori_loop(0, STEPS, one, state)

    return trainer.params(many(state, batch), kept)


def write_samples(folder: Path, model: Path, ids: np.ndarray, **header) -> Path:
    """The texts as prepared samples of the model."""
    tokenizer = load_tokenizer(model)
    made = dict(
        kind="samples",
        tokenizer=tokenizer.identity,
        template=Chat(tokenizer=tokenizer).template_hash,
        max_length=TOKENS,
    )
    with SampleWriter(folder, Header(**made | header)) as writer:
        for number, text in enumerate(ids):
            mask = np.arange(TOKENS) >= PROMPT
            writer.write(Sample(id=f"s{number}", ids=text.astype(np.int32), loss_mask=mask))
        writer.finish()
    return folder


def contract_file(target: DecoderTarget, names: tuple[str, ...] = layer_outputs(LAYER_IDS)) -> dict[str, str]:
    """As the trainer writes it beside an exported drafter."""
    contract = feature_contract(target, names, "float32")
    return {"feature_contract.json": json.dumps(dataclasses.asdict(contract))}
