"""Settings for every test: CPU, strict shapes."""

import gc
import os
import pathlib
import re
import sys

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import pytest

# What only `make test-all` runs.
EXTENDED_MODULES = {
    "test_dflash_tree",
    "test_dspark",
    "test_eagle",
    "test_eagle_decoding",
    "test_tree_decoding",
    "test_verify_tree",
    "test_schedule_law",
    "test_scheduled_engine",
    "test_trees",
    "test_schedule_commands",
    "test_simulate",
    "test_compiled_rounds",
    "test_compiled_update",
    "test_depth_samples",
    "test_eagle3_objective",
    "test_rollouts",
    "test_sequential_objectives",
    "test_benchmark_scripts",
    "test_check_eagle",
    "test_eagle_mesh",
    "test_two_processes",
    "test_eagle_training",
    "test_heads",
    "test_dflash_decoding",
    "test_sequential_training",
}
EXTENDED_DRAFTERS = {"dflash2", "fork", "tree", "eagle3", "eagle3-tree", "dflash", "dspark", "domino"}
EXTENDED_CASES = re.compile(r"\[(eagle3|eagle31|peagle|dspark|domino|f_dspark|x_domino)")
MAX_MAPS = 20_000  # of vm.max_map_count, 65,530 by default; beyond it XLA aborts

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_disable_most_optimizations", True)  # but see all_optimisations
# Several test modules build the same programs; the cache also makes a second run much faster.
jax.config.update(
    "jax_compilation_cache_dir", str(pathlib.Path(__file__).parent.parent / ".pytest_cache" / "compiled")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(autouse=True)
def all_optimisations(request):
    """For tests marked `optimized`; in others XLA leaves most out: tiny models compile longer than they run."""
    if request.node.get_closest_marker("optimized") is None:
        yield
        return
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Lets compiled programs go before their memory maps, several each, reach Linux's limit per process."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        for name in ("contract.engines", "contract.reused_prefixes"):
            # Their engines would trace their programs again, which tests take for a fault.
            if name in sys.modules:
                sys.modules[name].shared.cache_clear()
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items):
    """Marks what `make test` leaves out: tests that compile for minutes; `make test-all` runs them."""
    for item in items:
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if (
            item.path.stem in EXTENDED_MODULES
            or ("contract" in item.path.parts and params.get("drafter") in EXTENDED_DRAFTERS)
            or ("conformance" in item.path.parts and EXTENDED_CASES.search(item.name))
        ):
            item.add_marker(pytest.mark.extended)


def pytest_addoption(parser):
    parser.addoption("--cases", metavar="DIR", help="folder of golden cases for tests/conformance")
    parser.addoption(
        "--random-bodies",
        type=int,
        default=300,
        help="that tests/jspec_serve/test_fuzz.py makes from the OpenAPI",
    )
