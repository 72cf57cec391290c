"""Optional dependencies: imported where they are used, missed with one clear line."""

import importlib
from typing import Any


def require(module: str, extra: str) -> Any:
    """Import an optional `module`; ModuleNotFoundError with the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise  # installed, but one of its own dependencies is missing: say that one
        raise ModuleNotFoundError(
            f'{error.name} is not installed: pip install "dflash-jax[{extra}]"', name=error.name
        ) from None
