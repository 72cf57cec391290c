"""`dflash-jax export`: write a drafter as bf16 tensors that other implementations read."""

import argparse
from typing import Any

from dflash_jax.checkpoint import load_draft, save_draft


def add(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    export = commands.add_parser(
        "export", help="write a drafter as bf16 tensors that other implementations read"
    )
    export.set_defaults(run=run)
    export.add_argument("--draft", required=True, metavar="NAME|DIR", help="the drafter to write")
    export.add_argument("--out", required=True, metavar="DIR", help="directory to write")


def run(args: argparse.Namespace) -> int:
    """`dflash-jax export`."""
    if not args.out:
        raise ValueError("--out: expected a directory, found ''")
    draft = load_draft(args.draft, dtype="bfloat16")
    save_draft(draft, args.out)
    print(f"{args.out}: {draft.config.family} drafter, bf16, Hugging Face names")
    return 0
