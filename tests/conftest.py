"""Settings for every test: CPU, strict shapes."""

import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
# Several test modules build the same programs; the cache also makes a second run much faster.
jax.config.update(
    "jax_compilation_cache_dir", str(pathlib.Path(__file__).parent.parent / ".pytest_cache" / "compiled")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


def pytest_addoption(parser):
    parser.addoption("--cases", metavar="DIR", help="folder of golden cases for tests/conformance")
