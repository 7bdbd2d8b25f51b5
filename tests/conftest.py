"""Settings for every test: CPU, strict shapes."""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
