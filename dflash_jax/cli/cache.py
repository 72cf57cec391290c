"""Compiled programs kept between runs, in the user's cache folder."""

import argparse
import hashlib
import os
import platform
import sys
import warnings
from pathlib import Path
from typing import Any

import jax

LEAST_SECONDS = 0.2
"""Programs that compile faster than this are not worth a file."""


def add_compile_cache(parser: Any) -> None:
    """Add --no-compile-cache to a command that compiles."""
    parser.add_argument(
        "--compile-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"keep compiled programs in {str(cache_folder()).replace('%', '%%')} (default)",
    )


def use_compile_cache() -> None:
    """Keep compiled programs in `cache_folder`, unless jax was told of another place already."""
    config: Any = jax.config  # its options are made at run time
    if config.jax_compilation_cache_dir is not None:
        return
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        warnings.warn(f"compiled programs are not kept: {error}", stacklevel=2)
        return
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


def cache_folder() -> Path:
    """`dflash-jax/compiled-...` in XDG_CACHE_HOME, ~/Library/Caches (macOS) or ~/.cache.

    One a kind of processor: jax's key does not tell them apart, and a program compiled for one may
    use instructions that another lacks.
    """
    given = os.environ.get("XDG_CACHE_HOME")
    home = Path("~/Library/Caches" if sys.platform == "darwin" else "~/.cache")
    base = Path(given) if given else home.expanduser()
    return base / "dflash-jax" / f"compiled-{_processor()}"


def _processor() -> str:
    """A short name for this kind of processor and its instructions."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    told = [line for line in lines if line.lower().startswith(("model name", "flags", "features"))]
    kind = (platform.machine(), platform.processor(), *sorted(set(told)))
    return f"{platform.machine()}-{hashlib.sha256(repr(kind).encode()).hexdigest()[:8]}"
