"""Strict dtype promotion for the whole suite, the scripts' directory on the path, and a clean
compiler between modules.
"""

import sys
from pathlib import Path

import jax
import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))

# Meshes need several devices; all but the tests of meshes use the first alone.
jax.config.update("jax_num_cpu_devices", 8)
# A silent int -> float or f32 -> f64 promotion is a bug; say every cast.
jax.config.update("jax_numpy_dtype_promotion", "strict")


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
