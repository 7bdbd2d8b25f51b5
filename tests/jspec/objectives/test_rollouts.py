import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_texts import drafter, packed, tables

from jspec.drafters.eagle_net import eagle_net
from jspec.objectives.eagle_pass import first_pass, rollouts
from jspec.objectives.rollouts import all_places, rollout_rows, taken

DEPTHS = 4


def test_rows_read_and_learn_what_the_table_says():
    """Token i has id i + 1. Documents are tokens 0 to 6 and 7 to 12; their prompts are 0, 1 and 7, 8."""
    batch = packed(4)
    expected = {
        # (t, depth): (id read, position, index of the teacher); what is not here is not supervised.
        0: {t: (t + 2, t, t + 1) for t in (2, 3, 4, 5)} | {t: (t + 2, t - 7, t + 1) for t in (9, 10, 11)},
        1: {t: (t + 3, t + 1, t + 2) for t in (1, 2, 3, 4)} | {t: (t + 3, t - 6, t + 2) for t in (8, 9, 10)},
        2: {t: (t + 4, t + 2, t + 3) for t in (0, 1, 2, 3)} | {t: (t + 4, t - 5, t + 3) for t in (7, 8, 9)},
    }
    for depth, rows in expected.items():
        found = rollout_rows(batch, all_places(batch), depth)
        supervised = np.flatnonzero(np.asarray(found.supervised)[0])
        assert supervised.tolist() == sorted(rows), depth
        for t in supervised:
            read = tuple(int(np.asarray(a)[0, t]) for a in (found.ids, found.positions, found.teachers))
            assert read == rows[int(t)], (int(t), depth)


def test_no_row_learns_where_a_document_has_ended():
    """A mask of ones everywhere, also on the last token and on padding."""
    batch = packed(4)
    batch = dataclasses.replace(batch, loss_mask=jnp.ones_like(batch.loss_mask))
    ends = np.array([6] * 7 + [12] * 6 + [-1] * 2)  # last token of the document of each token
    for depth in range(4):
        row = rollout_rows(batch, all_places(batch), depth)
        np.testing.assert_array_equal(np.asarray(row.supervised)[0], np.arange(15) + depth + 1 <= ends)


def rolled_out(config, params, embed, batch, features):
    net = eagle_net(config, params)
    first = first_pass(net, embed, batch, features)
    return jnp.stack(rollouts(net, embed, batch, first, all_places(batch), DEPTHS))[:, 0]


@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "wide_layers": "all"}])
def test_a_row_sees_its_document_up_to_itself_and_its_own_depths(options):
    """By the gradient of every state for every feature and every token: nothing else has any influence."""
    config, params = drafter(**options)
    batch = packed(config.features_size)
    table = jax.random.normal(jax.random.key(1), (32, config.decoder.hidden_size))
    direction = jax.random.normal(jax.random.key(2), (config.decoder.hidden_size,))

    def projections(features, table):
        states = rolled_out(config, params, lambda ids: table[ids], batch, features)
        return states @ direction

    by_feature, by_token = jax.jit(jax.jacrev(projections, argnums=(0, 1)))(batch.features, table)
    by_feature = np.any(np.asarray(by_feature)[:, :, 0] != 0, axis=3)  # [depth, t, token]
    by_token = np.any(np.asarray(by_token) != 0, axis=3)  # [depth, t, id]
    for start, end in ((0, 7), (7, 13)):
        for t in range(start, end):
            for depth in range(DEPTHS):
                if t + 1 + depth >= end:
                    continue  # not supervised
                assert np.flatnonzero(by_feature[depth, t]).tolist() == list(range(start, t + 1))
                # Token i has id i + 1; pairs hold tokens start + 1 to t + 1, then one more at each depth.
                wanted = list(range(start + 2, t + 3 + depth))
                assert np.flatnonzero(by_token[depth, t]).tolist() == wanted, (t, depth)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"feeds_back_norm": True, "feature_norms": True},
        {"num_layers": 2, "norm_before_residual": True},
        # At depth 3 its own depth 1 is out of sight as well as the context.
        {"num_layers": 2, "layer_kinds": ("window", "full"), "window": 2},
        {"window": 1},
    ],
)
def test_depth_d_is_d_steps_of_inference(options):
    """The logits of every depth, against the net stepping token by token over its own cache."""
    config, params = drafter(**options)
    batch, target = packed(config.features_size), tables(config)
    net = eagle_net(config, params)
    states = jax.jit(lambda f: rolled_out(config, params, target.embed, batch, f))(batch.features)
    ids, scale = np.asarray(batch.ids)[0], config.decoder.query_scale

    def attended(cache, window, q, k, v):
        """Plain attention of a sequence over what is before it, as in a cache."""
        keys = jnp.concatenate([cache[0], k]) if cache else k
        values = jnp.concatenate([cache[1], v]) if cache else v
        group = config.decoder.num_heads // config.decoder.num_kv_heads
        scores = jnp.einsum("qhd,khd->hqk", q, jnp.repeat(keys, group, axis=1)) * scale
        before = keys.shape[0] - q.shape[0]
        place, key = jnp.arange(q.shape[0])[:, None] + before, jnp.arange(keys.shape[0])[None, :]
        seen = (key <= place) & (key > place - (keys.shape[0] if window is None else window))
        probs = jax.nn.softmax(jnp.where(seen[None], scores, -jnp.inf), axis=-1)
        return jnp.einsum("hqk,khd->qhd", probs, jnp.repeat(values, group, axis=1))

    def window_of(layer):
        return config.decoder.windows[config.decoder.layer_kinds[layer]]

    def step(cache, tokens, states, positions):
        return net.step(
            net.embed(jnp.asarray(tokens, jnp.int32), target.embed),
            states,
            jnp.asarray(positions, jnp.int32),
            lambda layer: functools.partial(attended, [part[layer] for part in cache], window_of(layer)),
        )

    start, t = 7, 8  # in the second document: positions begin again
    count = t + 1 - start

    @jax.jit
    def inference(features):
        out, k, v = step([], ids[start + 1 : t + 2], net.fuse(features[0, start : t + 1]), np.arange(count))
        outputs, cache, last = [out[-1]], [k, v], out[-1:]
        for depth in range(1, DEPTHS):
            token = ids[t + 1 + depth : t + 2 + depth]
            last, k, v = step(cache, token, net.fed_back(last), [count - 1 + depth])
            cache = [jnp.concatenate([cache[0], k], axis=1), jnp.concatenate([cache[1], v], axis=1)]
            outputs.append(last[0])
        outputs = jnp.stack(outputs)
        return outputs, net.logits(outputs, target.logits)

    expected, logits = inference(batch.features)
    np.testing.assert_allclose(states[:, t], expected, rtol=1e-5, atol=1e-5)
    ours = net.logits(states[:, t], target.logits)
    np.testing.assert_allclose(ours, logits, rtol=1e-5, atol=1e-5)


def test_taken_gathers_along_tokens():
    values = jnp.arange(12).reshape(2, 3, 2)
    index = jnp.asarray([[2, 0], [1, 1]])
    np.testing.assert_array_equal(taken(values, index), np.stack([values[0, [2, 0]], values[1, [1, 1]]]))
