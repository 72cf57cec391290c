"""`dflash-jax doctor`: find out why a drafter accepts little."""

import argparse
import json
import sys
from typing import Any

import jax

from dflash_jax import __version__
from dflash_jax.checkpoint import shipped_drafts
from dflash_jax.cli.cache import add_compile_cache
from dflash_jax.cli.shell import Status
from dflash_jax.doctor import Doctor
from dflash_jax.doctor.texts import read_prompts
from dflash_jax.targets.loading import load_target


def add(commands: Any) -> None:
    """Add the command to the parser's `commands`."""
    doctor = commands.add_parser(
        "doctor",
        help="find out why a drafter accepts little (exit code 0: healthy, 1: something found)",
    )
    doctor.set_defaults(run=run)
    doctor.add_argument(
        "--target",
        default="smollm2",
        metavar="smollm2|DIR|FILE.gguf|ORG/NAME",
        help="the model it drafts for (default: smollm2); of one that PyTorch runs (torch:DIR, "
        "torch:ORG/NAME) rows are compared, and no settings of the drafter tried",
    )
    doctor.add_argument(
        "--draft",
        required=True,
        metavar="NAME|DIR|FILE.gguf",
        help=f"the drafter: a directory, a file, or a shipped one ({', '.join(shipped_drafts())})",
    )
    doctor.add_argument(
        "--prompts",
        metavar="FILE",
        help=".jsonl with prompt, messages or prompt_ids (default: built-in prompts, or the "
        "target's own inventions where it has no tokenizer)",
    )
    doctor.add_argument("--harvest", metavar="dflash|dspark", help="which draft rows are proposals")
    doctor.add_argument("--seed", type=int, default=0, help="of texts and anchors (0)")
    doctor.add_argument(
        "--seconds",
        type=float,
        default=25.0,
        metavar="S",
        help="stop trying other settings after this long (25); loading and compiling come on top",
    )
    doctor.add_argument(
        "--dtype", choices=["float32", "bfloat16"], help="default: f32 on a CPU, bf16 elsewhere"
    )
    add_compile_cache(doctor)
    doctor.add_argument("--json", action="store_true", help="print one JSON object instead")


def run(args: argparse.Namespace) -> int:
    """`dflash-jax doctor`: 0 healthy, 1 something found."""
    if not args.seconds >= 0:
        raise ValueError(f"--seconds: expected 0 or more, found {args.seconds}")
    if not 0 <= args.seed < 1 << 31:
        raise ValueError(f"--seed: expected 0 to 2**31 - 1, found {args.seed}")
    status = Status(enabled=sys.stderr.isatty() and not args.json)
    status.show(f"loading {args.target}")
    loaded = load_target(args.target, args.dtype)
    prompts = None if args.prompts is None else read_prompts(args.prompts, loaded)
    status.show(f"examining {args.draft}")
    report = Doctor(loaded, prompts, args.seed).examine(
        args.draft,
        seconds=args.seconds,
        harvest=args.harvest,
        dtype=args.dtype,
        tell=lambda what: status.show(f"{args.draft}: {what}"),
    )
    report.versions = {"dflash-jax": __version__, "jax": jax.__version__}
    status.clear()
    print(json.dumps(report.to_dict()) if args.json else report.text())
    return 0 if report.healthy else 1
