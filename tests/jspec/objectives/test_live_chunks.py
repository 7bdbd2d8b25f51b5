import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.objectives.live_chunks import summed_over_live_chunks


def terms_of(theta, constants, items):
    weights, ids = theta["weights"], theta["ids"]
    values = jnp.tanh(items["x"] @ weights + constants) * items["live"]
    return jnp.sum(values), {"count": jnp.sum(items["live"]), "ids": jnp.sum(ids) * jnp.sum(items["live"])}


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_value_and_gradient_are_those_of_the_whole_sum(chunk):
    rng = np.random.default_rng(0)
    items = {"x": jnp.asarray(0.3 * rng.normal(size=(11, 4)), jnp.float32), "live": jnp.arange(11) < 7.0}
    items["live"] = items["live"].astype(jnp.float32)
    theta = {"weights": jnp.asarray(rng.normal(size=4), jnp.float32), "ids": jnp.arange(3)}

    def chunked(weights, items):
        value, sums = summed_over_live_chunks(
            terms_of, theta | {"weights": weights}, jnp.float32(0.3), items, items["live"] > 0, chunk=chunk
        )
        return 2.5 * value, sums

    def whole(weights, items):
        value, sums = terms_of(theta | {"weights": weights}, jnp.float32(0.3), items)
        return 2.5 * value, sums

    ours = jax.value_and_grad(chunked, argnums=(0, 1), has_aux=True)(theta["weights"], items)
    wanted = jax.value_and_grad(whole, argnums=(0, 1), has_aux=True)(theta["weights"], items)
    # What an item that is not live would change is not asked for.
    wanted[1][1]["live"], ours[1][1]["live"] = wanted[1][1]["live"][:7], ours[1][1]["live"][:7]
    assert np.all(np.asarray(ours[1][1]["x"][:7])) and not np.any(np.asarray(ours[1][1]["x"][7:]))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), ours, wanted)


def test_chunks_without_anything_live_are_not_computed():
    """They hold what would break the sum."""
    items = {"x": jnp.where(jnp.arange(12)[:, None] < 4, 1.0, jnp.nan) * jnp.ones((12, 4))}
    items["live"] = (jnp.arange(12) < 4).astype(jnp.float32)
    theta = {"weights": jnp.ones(4), "ids": jnp.arange(2)}
    for live, finite in ((items["live"] > 0, True), (jnp.arange(12) < 5, False)):
        value, _ = summed_over_live_chunks(terms_of, theta, jnp.float32(0), items, live, chunk=4)
        assert bool(jnp.isfinite(value)) == finite


def test_gradients_of_narrow_weights_are_summed_in_float32():
    """8 + 1/16 is 8 in bfloat16; sixteen times 1/16 is one more."""

    def terms(theta, constants, items):
        return jnp.sum(theta * items.astype(jnp.bfloat16)).astype(jnp.float32), {}

    items = jnp.asarray([8.0] + [0.0625] * 16)

    def loss(theta):
        return summed_over_live_chunks(terms, theta, None, items, items > 0, chunk=1)[0]

    assert float(jax.grad(loss)(jnp.bfloat16(1))) == 9.0


def test_what_a_loss_is_multiplied_with_is_not_rounded_to_narrow_weights():
    """9 * 0.7 is 6.3125 in bfloat16; with 0.7 rounded first, it is 6.28125."""

    def terms(theta, constants, items):
        return jnp.sum(theta * items.astype(jnp.bfloat16)).astype(jnp.float32), {}

    def loss(theta, items):
        return 0.7 * summed_over_live_chunks(terms, theta, None, items, jnp.ones(1, jnp.bool_), chunk=1)[0]

    narrow = jnp.asarray([9.0], jnp.bfloat16)
    own, moved = jax.grad(loss, argnums=(0, 1))(narrow, narrow)
    assert float(own[0]) == float(moved[0]) == 6.3125


@pytest.mark.parametrize("jit", [lambda loss: loss, jax.jit])
def test_closing_over_what_gradients_flow_to_is_refused(jit):
    def loss(weights):
        def terms(theta, constants, items):
            return jnp.sum(items * weights * theta), {}

        return summed_over_live_chunks(terms, jnp.ones(1), None, jnp.ones(3), jnp.ones(3, bool), chunk=1)[0]

    with pytest.raises(Exception, match=r"closed-over|unexpected tracer"):
        jax.grad(jit(loss))(jnp.ones(1))
