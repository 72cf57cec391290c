"""What all commands share: one-line errors, warnings and the line that says what is awaited."""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import jax

EXPECTED = (ValueError, OSError, NotImplementedError, ModuleNotFoundError, MemoryError)


def run_command(program: str, command: Callable[[], int]) -> int:
    """The exit code of a command; 2, and one line on stderr, for what its user can mend."""
    try:
        return command()
    except EXPECTED as error:
        reason = str(error) or "out of memory"
    except jax.errors.JaxRuntimeError as error:
        if not _out_of_memory(error):
            raise
        reason = f"out of memory: {str(error).splitlines()[0]}"
    print(f"{program}: {' '.join(reason.splitlines())}", file=sys.stderr)
    return 2


def _out_of_memory(error: Exception) -> bool:
    """Whether an error of XLA says that memory did not suffice."""
    text = str(error)
    return "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower()


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line like all others."""

    def error(self, message: str) -> Any:
        raise ValueError(message)


class Status:
    """One line on stderr that says what is being waited for; silent off a terminal."""

    def __init__(self, enabled: bool):
        self._enabled = enabled

    def show(self, what: str) -> None:
        if self._enabled:
            print(f"\r\033[K{what} ...", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._enabled:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def show_warning(message: Any, *_: Any, **__: Any) -> None:
    print(f"dflash-jax: warning: {message}", file=sys.stderr)
