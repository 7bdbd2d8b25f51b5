"""DFlash in real rounds: features that the target captured, prompts in chunks, partial accepts."""

import jax.numpy as jnp
import numpy as np
from tiny_decoder import FLOAT32, decoder, weights

from jspec.cache import new_cache
from jspec.decode import Method, Models
from jspec.drafters.dflash import dflash, dflash_leaves, dflash_net
from jspec.drafters.dflash_net import DFlashConfig
from jspec.engine import Engine
from jspec.round import Nodes
from jspec.settings import Settings
from jspec.targets.decoder import DecoderTarget, decoder_leaves
from pallas_kernels.attention.pages import gather_rows

VOCABULARY = 4  # so few that even an untrained drafter is often right

TARGET = DecoderTarget(decoder("qwen3", ("full", "window"), VOCABULARY))
DRAFTER = dflash(
    DFlashConfig(
        decoder=decoder("dflash", ("full",), VOCABULARY),
        block_size=4,
        mask_token_id=3,
        target_layer_ids=(1, -1),
        num_target_layers=2,
        target_hidden_size=8,
    )
)
PROMPT = [0, 1, 2, 1, 0, 2, 2, 1, 0, 1, 2, 0, 1, 1, 0, 2, 1, 2, 0]  # three chunks

TARGET_PARAMS = weights(decoder_leaves(TARGET.config, FLOAT32), 0)
PARAMS = weights(dflash_leaves(DRAFTER.config, FLOAT32), 1)


def test_state_after_real_rounds_equals_a_rebuild():
    engine = Engine(
        method=Method(target=TARGET, drafter=DRAFTER),
        models=Models(target=TARGET_PARAMS, drafter=PARAMS),
        tokenizer=None,
        eos_ids=(),
        max_slots=1,
        max_context=48,
        page_size=4,
        chunks=(7,),
    )
    # Coupled sampling of few tokens: an untrained drafter is wrong, half right and right in turn.
    result = engine.generate([PROMPT], Settings(max_tokens=25, seed=1, temperature=1.0))[0]
    assert sum(count > 0 for count in result.counters.accept_histogram) >= 3

    state = engine._runner.state
    length = int(state.cache.lengths[0])
    assert length == len(PROMPT) + 25 - 1
    tokens = jnp.asarray([*PROMPT, *result.token_ids][:length], jnp.int32)
    position = jnp.arange(length, dtype=jnp.int32)
    nodes = Nodes(
        tokens=tokens,
        positions=position,
        parents=position - 1,
        offsets=jnp.asarray([0, length], jnp.int32),
        certain_lengths=jnp.asarray([length], jnp.int32),
    )
    empty = new_cache(
        TARGET.groups, max_slots=1, num_pages=(1, 1), page_size=4, max_context=48, dtype=FLOAT32
    )
    out = TARGET.forward(
        TARGET_PARAMS, nodes, empty, jnp.zeros((1,), jnp.int32), DRAFTER.features, max_queries=length
    )
    expected = dflash_net(DRAFTER.config, PARAMS).context_rows(out.features, position)
    rows = gather_rows(state.drafter.pages, 0, state.cache.groups[0].page_table[:1], length)
    for row, rebuilt in zip(rows, expected, strict=True):
        np.testing.assert_allclose(row[0], rebuilt[0], atol=2e-4)
