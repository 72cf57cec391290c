"""`dflash-jax`: a thin shell over the Python interface, one module a command.

Everything here can be done from Python: `load_target`, `load_draft`, `SpecSession`, `compare`.
"""

import warnings
from collections.abc import Sequence

from dflash_jax import __version__
from dflash_jax.cli import bench, cache, doctor, export, generate, inspect, plan
from dflash_jax.cli.shell import Parser, run_command, show_warning

__all__ = ["COMMANDS", "Parser", "main", "make_parser", "run_command"]

COMMANDS = (generate, bench, inspect, doctor, plan, export)
"""Modules whose `add` puts a command on the parser and says what runs it."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code (2 for bad input, with one line on stderr)."""
    warnings.showwarning = show_warning

    def command() -> int:
        args = make_parser().parse_args(argv)
        if getattr(args, "compile_cache", False):
            cache.use_compile_cache()
        return args.run(args)

    try:
        return run_command("dflash-jax", command)
    except KeyboardInterrupt:
        return 130


def make_parser() -> Parser:
    """The parser of all commands; `args.run(args)` is the exit code."""
    parser = Parser(
        prog="dflash-jax",
        description="Decode with a block drafter, measure it, or find out what is wrong with it.",
    )
    parser.add_argument("--version", action="version", version=f"dflash-jax {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add(commands)
    return parser
