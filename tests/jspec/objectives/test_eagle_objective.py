import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eagle_texts import drafter, packed
from training_data import HIDDEN, documents, tiny_target

from jspec.objectives.eagle import EagleObjective


def test_a_perfect_feature_costs_what_the_target_costs_itself():
    """With a state that is the next feature, the regression is 0 and acceptance 1: the alignment by its effect."""
    config, params = drafter("eagle")
    batch = packed(HIDDEN)

    class Perfect(EagleObjective):
        def _sums(self, theta, constants, places, supervised):
            states = jnp.roll(batch.features, -1, axis=1)
            return super()._sums((theta[0], states), constants, places, supervised)

    objective = Perfect(config=config, chunk=4)
    noise = objective.choose(batch, jax.random.key(0))
    means = jax.jit(objective.terms)(params, tiny_target(), batch, noise).means()
    assert float(means["feature_loss"]) == 0
    assert float(means["acceptance"]) == pytest.approx(1, abs=1e-5)
    assert float(means["accuracy"]) == 1


@pytest.mark.parametrize("noise", ["uniform", "gaussian"])
def test_noise_has_the_width_asked_for_and_follows_the_key(noise):
    config, _ = drafter("eagle")
    batch = documents(2, 24, HIDDEN)
    objective = EagleObjective(config=config, noise=noise, noise_width=0.2)
    drawn = objective.choose(batch, jax.random.key(0))
    assert drawn.shape == batch.features.shape
    again, other = (objective.choose(batch, jax.random.key(k)) for k in (0, 1))
    np.testing.assert_array_equal(drawn, again)
    assert not np.array_equal(drawn, other)
    inside = np.asarray(batch.segments) > 0
    if noise == "gaussian":
        assert 0.18 < np.asarray(drawn)[inside].std() < 0.22
        return
    for row in range(2):
        length = inside[row].sum()
        bound = 0.5 * 0.2 * 512 / length
        values = np.asarray(drawn)[row][inside[row]]
        assert 0.9 * bound < np.abs(values).max() <= bound


def test_no_noise_is_no_array():
    config, _ = drafter("eagle")
    batch = documents(1, 12, HIDDEN)
    assert EagleObjective(config=config).choose(batch, jax.random.key(0)).shape == (1, 12, 0)
