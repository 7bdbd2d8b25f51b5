"""Settings for every test: CPU, strict shapes."""

import gc
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax
import pytest

# Drafters whose contract tests run in `make test-all` only: each compiles engines of its own for minutes, and another
# drafter of the same kind is in every run.
EXTENDED = ("fork", "eagle3-tree", "dspark", "domino", "sparse", "cut1")
MAX_MAPS = 20_000  # of vm.max_map_count, 65,530 by default; beyond it XLA aborts

jax.config.update("jax_numpy_rank_promotion", "raise")
# Several test modules build the same programs; the cache also makes a second run much faster.
jax.config.update(
    "jax_compilation_cache_dir", str(pathlib.Path(__file__).parent.parent / ".pytest_cache" / "compiled")
)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.3)


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request):
    """Most tests run what they compile for milliseconds: LLVM's optimization would be most of their time.

    Modules that decode with a real model set OPTIMIZED = True.
    """
    optimized = getattr(request.module, "OPTIMIZED", False)
    jax.config.update("jax_disable_most_optimizations", not optimized)


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Lets compiled programs go before their memory maps, several each, reach Linux's limit per process."""
    yield
    maps = pathlib.Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MAX_MAPS:
        jax.clear_caches()
        gc.collect()


def pytest_collection_modifyitems(items):
    """Tests that use the same engines go to the same worker (`--dist loadgroup`), which compiles them once."""
    for item in items:
        module = item.path.relative_to(item.config.rootpath).as_posix()
        params = item.callspec.params if hasattr(item, "callspec") else {}
        if module.startswith("tests/conformance/"):
            continue  # cases share nothing
        drafter = params.get("drafter") if module.startswith("tests/contract/") else None
        item.add_marker(pytest.mark.xdist_group(module if drafter is None else f"contract {drafter}"))
        if drafter in EXTENDED:
            item.add_marker(pytest.mark.extended)


def pytest_addoption(parser):
    parser.addoption("--cases", metavar="DIR", help="folder of golden cases for tests/conformance")
