"""The options that name devices, and processes that work together."""

import argparse
import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from dflash_jax.sharding import make_mesh


def add_devices(parser: Any) -> None:
    """Add --tp, --data and the options of several processes."""
    add_mesh(parser)
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of several processes, all started with the same arguments but --process-id; the "
        "models are split over the devices of all of them",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process-id", type=int, metavar="I", help="this one's number, 0..N-1")


def add_mesh(parser: Any) -> None:
    """Add --tp and --data."""
    parser.add_argument(
        "--tp", type=int, metavar="N", help="split both models over N devices (tensor parallel)"
    )
    parser.add_argument(
        "--data",
        type=int,
        metavar="D",
        help="split the sequences of a batch over D groups of such devices",
    )


def mesh_of(
    args: argparse.Namespace, make: Callable[[int, int], Any], model: int | None = None
) -> Any:
    """The mesh of --tp and --data, None where there is neither; model: what --tp is by default."""
    if args.tp is None and args.data is None and model is None:
        return None
    one = 1 if model is None else model
    return make(one if args.tp is None else args.tp, 1 if args.data is None else args.data)


def join_devices(args: argparse.Namespace) -> Mesh | None:
    """The devices to run over, those of all processes joined; None for the default one."""
    group = {"--processes": args.processes, "--process-id": args.process_id}
    if args.coordinator is None:
        for flag, value in group.items():
            if value is not None:
                raise ValueError(f"{flag}: expected with --coordinator, found without")
        return mesh_of(args, make_mesh)
    for flag, value in group.items():
        if value is None:
            raise ValueError(f"{flag}: expected with --coordinator, found none")
    if not 0 <= args.process_id < args.processes:
        raise ValueError(f"--process-id: expected 0..{args.processes - 1}, found {args.process_id}")
    jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
    return mesh_of(args, make_mesh, model=jax.device_count() // max(1, args.data or 1))


@contextlib.contextmanager
def first_process_prints(args: argparse.Namespace) -> Iterator[None]:
    """All processes compute the same; one of them says it."""
    if args.process_id in (None, 0):
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
