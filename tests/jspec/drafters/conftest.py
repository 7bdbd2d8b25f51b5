"""A target for drafters that do not look at theirs, and a table of greedy slots."""

import jax.numpy as jnp
import pytest

from jspec.cache import new_cache
from jspec.sampling import SamplingTable, empty_table
from jspec.targets.table import TableTarget
from jspec.targets.view import TargetView


@pytest.fixture
def view() -> TargetView:
    target = TableTarget(vocab_size=10)
    cache = new_cache(
        target.groups, max_slots=3, num_pages=(4,), page_size=4, max_context=16, dtype=jnp.dtype(jnp.float32)
    )
    return TargetView(params=(jnp.eye(10),), cache=cache, target=target)


@pytest.fixture
def greedy() -> SamplingTable:
    return empty_table(3, 10, 1)
