"""Strict dtype and rank promotion for the whole suite, the scripts' directory on the path, and a
compiler that is quick, and clean between modules.
"""

import os
import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

# Meshes need several devices; all but the tests of meshes use the first alone.
jax.config.update("jax_num_cpu_devices", 8)
# A silent int -> float or f32 -> f64 promotion is a bug; say every cast.
jax.config.update("jax_numpy_dtype_promotion", "strict")
# And so is `[n]` that meets `[B, n]`, or `[B, B]`; say every axis.
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the suite's time is XLA compiling small programs that run a few times, and half of that is
# LLVM's optimisation (below) and jax 0.10's MLIR fusion emitters (later an unknown flag, so fatal).
# XLA's own passes, fusion, donation and aliasing among them, stay as users have them. The variable
# is read when the backend starts, and by subprocesses.
if jax.__version_info__ < (0, 11):
    flags = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] = f"--xla_cpu_use_fusion_emitters=false {flags}"


LONGEST = [
    "test_law",
    "test_session",
    "test_oracles",
    "test_sampled",
    "test_loop",
    "test_tail",
    "test_training",
    "test_policy",
    "test_kernels_conv",
    "test_bench",
]


def pytest_collection_modifyitems(items):
    """A worker takes a file at a time, in this order: long ones first, so that all end together."""
    order = {name: i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.stem, len(order)))


def pytest_runtest_setup(item):
    """LLVM optimises only what runs longer than it compiles: tests marked `runs_long`."""
    long = item.get_closest_marker("runs_long") is not None
    jax.config.update("jax_disable_most_optimizations", not long)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Hundreds of compiled programs held to the end cost gigabytes, and slow each collection."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True, scope="session")
def _no_compile_cache():
    """Commands compile afresh: no test reads or writes the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dflash_jax.cli.cache.use_compile_cache", lambda: None)
        yield
