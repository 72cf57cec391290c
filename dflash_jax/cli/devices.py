"""The options that name devices, and processes that work together."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from dflash_jax.sharding import make_mesh


def add_devices(parser: Any) -> None:
    """Add --tp and the options of several processes."""
    parser.add_argument(
        "--tp", type=int, metavar="N", help="split both models over N devices (tensor parallel)"
    )
    parser.add_argument(
        "--coordinator",
        metavar="HOST:PORT",
        help="of several processes, all started with the same arguments but --process-id; the "
        "models are split over the devices of all of them",
    )
    parser.add_argument("--processes", type=int, metavar="N", help="how many there are")
    parser.add_argument("--process-id", type=int, metavar="I", help="this one's number, 0..N-1")


def join_devices(args: argparse.Namespace) -> Mesh | None:
    """The devices to run over, those of all processes joined; None for the default one."""
    group = {"--processes": args.processes, "--process-id": args.process_id}
    if args.coordinator is None:
        for flag, value in group.items():
            if value is not None:
                raise ValueError(f"{flag}: expected with --coordinator, found without")
        return None if args.tp is None else make_mesh(args.tp)
    for flag, value in group.items():
        if value is None:
            raise ValueError(f"{flag}: expected with --coordinator, found none")
    if not 0 <= args.process_id < args.processes:
        raise ValueError(f"--process-id: expected 0..{args.processes - 1}, found {args.process_id}")
    jax.distributed.initialize(args.coordinator, args.processes, args.process_id)
    return make_mesh(jax.device_count() if args.tp is None else args.tp)


@contextlib.contextmanager
def first_process_prints(args: argparse.Namespace) -> Iterator[None]:
    """All processes compute the same; one of them says it."""
    if args.process_id in (None, 0):
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
