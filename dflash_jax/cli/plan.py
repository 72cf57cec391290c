"""`dflash-jax plan`: how much memory a generation takes, without loading a weight."""

import argparse
import json
from typing import Any

import jax

from dflash_jax.cli.cache import add_compile_cache
from dflash_jax.cli.decoding import add_draft_kv, draft_kv_options
from dflash_jax.cli.devices import add_mesh, mesh_of
from dflash_jax.cli.models import abstract_models, add_models
from dflash_jax.plan import amount
from dflash_jax.session import SpecSession
from dflash_jax.sharding import make_mesh, planned_mesh


def add(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    plan = commands.add_parser("plan", help="say how much memory a generation takes")
    plan.set_defaults(run=run)
    add_models(plan)
    add_mesh(plan)
    plan.add_argument(
        "--context",
        type=int,
        metavar="N",
        help="tokens of a sequence, prompt and new ones (default: 4096, or the model's limit)",
    )
    plan.add_argument("--batch", type=int, default=1, metavar="B", help="sequences (default: 1)")
    plan.add_argument("--capacity", type=int, metavar="ROWS", help="context rows to allocate")
    plan.add_argument("--chunk", type=int, metavar="ROWS", help="rows of a prompt read at once")
    plan.add_argument("--block-size", type=int, metavar="B", help="rows drafted a round")
    add_draft_kv(plan)
    plan.add_argument(
        "--compiled",
        action="store_true",
        help="compile both programs for this device, and take their working memory from that",
    )
    add_compile_cache(plan)
    plan.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """`dflash-jax plan`."""
    target, draft = abstract_models(args)
    if args.block_size is not None and draft is None:
        raise ValueError("--block-size: expected a drafter to apply it to, found --draft none")
    # Programs are compiled for devices that are here; bytes are counted without any.
    mesh = mesh_of(args, make_mesh if args.compiled else planned_mesh)
    session = SpecSession(
        target,
        draft,
        capacity=args.capacity,
        chunk=args.chunk,
        block_size=args.block_size,
        mesh=mesh,
        **draft_kv_options(args, draft),
    )
    context = min(4096, target.max_positions) if args.context is None else args.context
    plan = session.memory(context, args.batch, compiled=args.compiled)
    room = device_memory()
    if args.json:
        print(json.dumps(plan.as_dict() | {"device_memory": room}))
        return 0
    print(plan)
    if room is not None:
        fits = "fits" if plan.total <= room else "does not fit"
        print(f"{jax.devices()[0].device_kind}: {amount(room)}, {fits}")
    return 0


def device_memory() -> int | None:
    """Bytes that this process may use on its device; None where that is not told (a CPU)."""
    stats = jax.devices()[0].memory_stats()
    return None if stats is None else stats.get("bytes_limit")
