"""The package as a user sees it: names, the pallas folder, scripts that explain themselves."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

import dflash_jax

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    "name",
    [
        "DFlashConfig",
        "DFlashDraft",
        "DFlashLayer",
        "DraftKV",
        "DSparkHarvest",
        "SpecSession",
        "ctx_features",
        "dspark_accept_prefix",
        "dspark_strategy_census",
        "forward",
        "forward_block",
        "forward_round",
        "generate",
        "generate_stream",
        "ingest_ctx",
        "load_draft",
        "load_target",
        "save_draft",
    ],
)
def test_public_names(name):
    assert name in dflash_jax.__all__
    assert getattr(dflash_jax, name).__doc__


def test_every_name_listed_is_there():
    for name in dflash_jax.__all__:
        assert hasattr(dflash_jax, name)


def test_the_pallas_folder_has_one_name_only():
    import dflash_jax.pallas

    origin = Path(dflash_jax.pallas.__file__)
    spec = importlib.util.spec_from_file_location("pallas", origin)
    with pytest.raises(
        ImportError, match=r"import these kernels as dflash_jax.pallas, not as pallas"
    ):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_importing_needs_no_extra():
    """The core must import without the optional packages."""
    extras = (
        "gguf",
        "tokenizers",
        "jinja2",
        "optax",
        "huggingface_hub",
        "matplotlib",
        "torch",
        "transformers",
    )
    blocked = "; ".join(f"sys.modules[{name!r}] = None" for name in extras)
    code = f"import sys; {blocked}; import dflash_jax; print(dflash_jax.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == dflash_jax.__version__
