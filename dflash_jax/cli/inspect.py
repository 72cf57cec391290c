"""`dflash-jax inspect`: what a drafter is, from its headers."""

import argparse
import json
from typing import Any

from dflash_jax.checkpoint import shipped_drafts
from dflash_jax.cli.models import DEFAULT_DRAFT
from dflash_jax.describe import describe_draft
from dflash_jax.plan import amount
from dflash_jax.session import SpecSession
from dflash_jax.targets.loading import abstract_target


def add(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    inspect = commands.add_parser("inspect", help="say what a drafter is, from its headers")
    inspect.set_defaults(run=run)
    inspect.add_argument(
        "draft",
        nargs="?",
        default=DEFAULT_DRAFT,
        metavar="DRAFT",
        help=f"a shipped drafter ({', '.join(shipped_drafts())}) or a directory "
        f"(default: {DEFAULT_DRAFT})",
    )
    inspect.add_argument(
        "--target",
        metavar="smollm2|DIR|FILE.gguf|ORG/NAME",
        help="check the drafter against this model too, and say what both need",
    )
    inspect.add_argument(
        "--context", type=int, metavar="N", help="tokens to plan memory for (default: 4096)"
    )
    inspect.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: f32 on a CPU, bf16 elsewhere"
    )
    inspect.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """`dflash-jax inspect`: 0 for a drafter that loads, 1 for one that does not."""
    if args.context is not None and args.target is None:
        raise ValueError("--context: expected --target beside it, found none")
    target = None if args.target is None else abstract_target(args.target, args.dtype)
    found, memory = describe_draft(args.draft, target, args.dtype), None
    if target is not None and found.problem is None:
        context = min(4096, target.max_positions) if args.context is None else args.context
        memory = SpecSession(target, found.shapes).memory(context)
    if args.json:
        told = None if memory is None else memory.as_dict()
        print(json.dumps(found.as_dict() | {"memory": told}))
    else:
        print(found)
    if memory is not None and not args.json:
        print(
            f"with {args.target}, {memory.capacity} rows: weights {amount(memory.weights)}, "
            f"caches {amount(memory.caches)}, working {amount(memory.working)}, "
            f"in all {amount(memory.total)}"
        )
    return 0 if found.problem is None else 1
